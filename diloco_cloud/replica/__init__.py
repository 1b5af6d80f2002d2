"""What a replica tells its run while it trains: heartbeat, metrics, logs, and how it ended."""
