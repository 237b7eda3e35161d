"""From a request to a plan, with advice where nothing fits; without Keras and without a job."""
