"""Bring AWS to the desired state: plan, apply, wait, roll back."""
