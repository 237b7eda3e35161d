"""Leads from the import of smp_tf to a connected job, and ends it."""
