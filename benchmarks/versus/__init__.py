"""smp_tf against torch: the cut, the settings, the report."""
