"""Notices that something waits, died or diverged, and says so."""
