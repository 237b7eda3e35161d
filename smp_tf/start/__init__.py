"""From the import of smp_tf to a connected job, and its end."""
