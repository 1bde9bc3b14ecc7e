"""Networks that are not chains, as dynamic games between their layers."""
