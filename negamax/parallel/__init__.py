"""The rank grid (layout, pure arithmetic) and the process groups between ranks (context)."""
