-- 003_databases.sql: what a database of several knows (docs/operate/cluster.md).
--
-- Run by whoever owns the schema, after 002_peers.sql; on a cluster that runs, before
-- its servers are replaced by those that want it.
--
-- Who this database is, by a name that the first server gives it, and those of all
-- databases of its cluster in their order, which servers are told and compare.
CREATE TABLE bellwether.identity (
  one       integer PRIMARY KEY,
  name      text NOT NULL,
  databases text NOT NULL DEFAULT ''
);
GRANT SELECT, INSERT, UPDATE ON bellwether.identity TO bellwether_server;
GRANT SELECT ON bellwether.identity TO bellwether_reader;

-- Alerts of this database's runs that the first database has not numbered yet; of use
-- in all others.
CREATE TABLE bellwether.alerts_waiting (
  p     integer NOT NULL,
  run   bigint NOT NULL,
  key   text NOT NULL,
  k     integer NOT NULL,
  epoch bigint NOT NULL,
  owner text NOT NULL,
  at    timestamptz NOT NULL DEFAULT now(),
  body  bytea NOT NULL,
  PRIMARY KEY (p, run, key, k)
);
GRANT SELECT, INSERT, UPDATE, DELETE ON bellwether.alerts_waiting TO bellwether_server;
GRANT SELECT ON bellwether.alerts_waiting TO bellwether_reader;

INSERT INTO bellwether.migrations (version) VALUES (3);
