"""One HTML file that shows a run: no server, no network, no other file."""
