"""Where roles keep what must last: durable state in SQLite, blocks in host memory and in files, all
sealed."""
