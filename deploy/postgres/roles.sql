-- roles.sql: who may do what.  Run by whoever owns the schema, after 001_tables.sql.
--
-- bellwether_server  the right to serve, without a login of its own: grant it to
--                    the role that the servers' connection string names.  It reads
--                    and writes rows, and empties the frames of old days; it makes,
--                    changes and drops no table, and gives nobody a right.
-- bellwether_reader  for people and checks: reads, and writes nothing.

CREATE ROLE bellwether_server NOLOGIN;
CREATE ROLE bellwether_reader NOLOGIN;

GRANT USAGE ON SCHEMA bellwether TO bellwether_server, bellwether_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA bellwether TO bellwether_server, bellwether_reader;

GRANT INSERT, UPDATE ON bellwether.servers TO bellwether_server;
GRANT UPDATE ON bellwether.lease TO bellwether_server;
GRANT UPDATE ON bellwether.alert_count TO bellwether_server;
GRANT INSERT ON bellwether.alerts TO bellwether_server;
GRANT INSERT, UPDATE, DELETE ON bellwether.run_rows TO bellwether_server;
GRANT INSERT, TRUNCATE ON bellwether.frames_0, bellwether.frames_1, bellwether.frames_2, bellwether.frames_3
  TO bellwether_server;
