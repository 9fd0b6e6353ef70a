"""The commands behind the figures in the documents; `scripts/bench list` names them."""
