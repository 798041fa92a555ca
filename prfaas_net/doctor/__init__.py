"""What this host's settings mean for a link. Facts are collected in one place and judged, purely, in another."""
