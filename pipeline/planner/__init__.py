"""Makes a plan from a request, with advice where nothing fits. It needs neither Keras nor a job."""
