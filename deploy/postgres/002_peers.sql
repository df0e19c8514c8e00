-- 002_peers.sql: what servers know each other by (docs/operate/cluster.md).
--
-- Run by whoever owns the schema, after 001_tables.sql and roles.sql; on a cluster
-- that runs, before its servers are replaced by those that want it.
--
-- One key, made by the first server.  Whoever reads it can ask any server as anybody:
-- servers alone may.
CREATE TABLE bellwether.peer_key (
  one integer PRIMARY KEY,
  key bytea NOT NULL
);
GRANT SELECT, INSERT ON bellwether.peer_key TO bellwether_server;

INSERT INTO bellwether.migrations (version) VALUES (2);
