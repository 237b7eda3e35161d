"""Planning, reports and exports without a job: clusters, search, pages and files of models."""
