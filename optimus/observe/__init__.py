"""What a run tells: metrics, progress, machine."""
