"""Real shapes: launchers of specs and measurements that need a large GPU."""
