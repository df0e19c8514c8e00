"""What every room may take: the log, files, integers, errors kept from the job, ranks."""
