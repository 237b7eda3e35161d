"""Planning and reports without a job: clusters, search and pages."""
