"""Reports of what broke in other systems, with real nodes (see tests/cases.py)."""

import json
import socket
import subprocess
from pathlib import Path

from tests.e2e.node_process import NODE, clean_environment
from tests.e2e.peer_processes import alive, cluster, node_id, state, until
from tests.fake_model import make_fake

ROUTE_ONLY = ("--model", "none")


def test_a_node_without_http_executes_for_the_others(tmp_path: Path) -> None:
    """A5 (exo#2135)."""
    model = str(make_fake(tmp_path / "model", answer_tokens=5))
    with cluster(tmp_path, ROUTE_ONLY, ("--model", model, "--api", "none"), watched=1) as (home, executor):
        until(lambda: alive(home) == {node_id(home), node_id(executor)})
        status, headers, data = home.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert status == 200, data
        assert headers["x-shoal-executed-by"] == node_id(executor)


def test_an_address_that_can_not_be_reached_is_shown_with_its_reason(tmp_path: Path) -> None:
    """A8 (exo#1743 and others): no silence where somebody mistyped, and no harm either."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with cluster(tmp_path, ROUTE_ONLY, (*ROUTE_ONLY, "--join", nobody)) as (_, joiner):
            until(lambda: state(joiner)["unreachable"])
            (unreached,) = state(joiner)["unreachable"]
            assert nobody in json.dumps(unreached) or nobody.split(":")[1] in json.dumps(unreached)
            shown = subprocess.run(
                [NODE, "status", "--api", joiner.url],
                capture_output=True,
                text=True,
                check=True,
                env=clean_environment(joiner.directory) | {"COLUMNS": "200"},
            )
            assert "refused" in shown.stdout
