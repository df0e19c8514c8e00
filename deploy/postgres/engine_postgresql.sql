-- engine_postgresql.sql: what only PostgreSQL (and AlloyDB) is told.  Run after
-- 001_tables.sql.
--
-- The bodies are compressed already: kept as they are, outside of the row.
ALTER TABLE bellwether.frames_0 ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE bellwether.frames_1 ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE bellwether.frames_2 ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE bellwether.frames_3 ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE bellwether.run_rows ALTER COLUMN value SET STORAGE EXTERNAL;
-- Leases are renewed in place, each third of their time.
ALTER TABLE bellwether.lease SET (fillfactor = 50);
ALTER TABLE bellwether.servers SET (fillfactor = 50);
ALTER TABLE bellwether.alert_count SET (fillfactor = 50);
