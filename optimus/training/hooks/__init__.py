"""Hooks around the training steps."""
