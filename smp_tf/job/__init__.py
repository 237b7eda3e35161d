"""The running job: who this rank is, who the others are, how ranks agree and talk, and what ends with the job."""
