"""What the commands of `cope-trl` do."""
