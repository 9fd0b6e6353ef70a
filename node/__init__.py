"""What this node does in the cluster: its command line, its configuration, its runners and the life of a task."""
