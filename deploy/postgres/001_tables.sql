-- 001_tables.sql: what several bellwetherd share (docs/operate/cluster.md).
--
-- Run by whoever owns the schema, once, in the order of the file names; servers
-- change no tables.  Portable on purpose: no sequences, triggers, advisory locks,
-- LISTEN, arrays or PARTITION BY.  Every key but those of servers, migrations and
-- alert_count begins with the partition p, by which a distributed database may
-- spread them.  What only one engine knows is in a file of its own (engine_*.sql).

CREATE SCHEMA bellwether;

-- Which of these files were run.
CREATE TABLE bellwether.migrations (
  version integer PRIMARY KEY,
  at      timestamptz NOT NULL DEFAULT now()
);

-- Who is there, so that each takes its share.  Rows of servers that are gone stay
-- until the name comes again.
CREATE TABLE bellwether.servers (
  name    text PRIMARY KEY,
  address text NOT NULL,
  until   timestamptz NOT NULL
);

-- Who owns a partition.  epoch rises with each taking; whoever writes locks the row
-- and checks his epoch in the same transaction.  Below keep no frame is needed.
CREATE TABLE bellwether.lease (
  p       integer PRIMARY KEY,
  owner   text NOT NULL DEFAULT '',
  address text NOT NULL DEFAULT '',
  epoch   bigint NOT NULL DEFAULT 0,
  until   timestamptz NOT NULL DEFAULT '1970-01-01 00:00:00+00',
  keep    bigint NOT NULL DEFAULT 0
);

-- The log: a row is a commit of one partition, its records packed.  Of the days
-- since 1970, modulo 4, each has a table: the two that are neither today's nor
-- yesterday's are emptied, which costs nothing, where deleting rows would.
CREATE TABLE bellwether.frames_0 (
  p         integer NOT NULL,
  first_lsn bigint NOT NULL,
  last_lsn  bigint NOT NULL,
  epoch     bigint NOT NULL,
  owner     text NOT NULL,
  at        timestamptz NOT NULL DEFAULT now(),
  body      bytea NOT NULL,
  PRIMARY KEY (p, first_lsn)
);
CREATE TABLE bellwether.frames_1 (
  p         integer NOT NULL,
  first_lsn bigint NOT NULL,
  last_lsn  bigint NOT NULL,
  epoch     bigint NOT NULL,
  owner     text NOT NULL,
  at        timestamptz NOT NULL DEFAULT now(),
  body      bytea NOT NULL,
  PRIMARY KEY (p, first_lsn)
);
CREATE TABLE bellwether.frames_2 (
  p         integer NOT NULL,
  first_lsn bigint NOT NULL,
  last_lsn  bigint NOT NULL,
  epoch     bigint NOT NULL,
  owner     text NOT NULL,
  at        timestamptz NOT NULL DEFAULT now(),
  body      bytea NOT NULL,
  PRIMARY KEY (p, first_lsn)
);
CREATE TABLE bellwether.frames_3 (
  p         integer NOT NULL,
  first_lsn bigint NOT NULL,
  last_lsn  bigint NOT NULL,
  epoch     bigint NOT NULL,
  owner     text NOT NULL,
  at        timestamptz NOT NULL DEFAULT now(),
  body      bytea NOT NULL,
  PRIMARY KEY (p, first_lsn)
);

-- Everything that an owner keeps of its runs beside the log: what they are, saved
-- states, ranks, series, events, notes, actions and their audit.  Keys as in
-- server/store/database.h.
CREATE TABLE bellwether.run_rows (
  p     integer NOT NULL,
  key   bytea NOT NULL,
  value bytea NOT NULL,
  PRIMARY KEY (p, key)
);

-- Each transition of each alert once.  n is counted in one row, whose lock holds
-- until the commit: numbers become visible in their order, and a reader that goes
-- by them misses none.
CREATE TABLE bellwether.alerts (
  p     integer NOT NULL,
  run   bigint NOT NULL,
  key   text NOT NULL,
  k     integer NOT NULL,
  n     bigint NOT NULL,
  epoch bigint NOT NULL,
  owner text NOT NULL,
  at    timestamptz NOT NULL DEFAULT now(),
  body  bytea NOT NULL,
  PRIMARY KEY (p, run, key, k)
);
CREATE INDEX alerts_n ON bellwether.alerts (n);
CREATE TABLE bellwether.alert_count (
  one integer PRIMARY KEY,
  n   bigint NOT NULL
);

INSERT INTO bellwether.alert_count (one, n) VALUES (1, 0);
INSERT INTO bellwether.lease (p) VALUES
  (0), (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), (12), (13), (14), (15),
  (16), (17), (18), (19), (20), (21), (22), (23), (24), (25), (26), (27), (28), (29), (30), (31),
  (32), (33), (34), (35), (36), (37), (38), (39), (40), (41), (42), (43), (44), (45), (46), (47),
  (48), (49), (50), (51), (52), (53), (54), (55), (56), (57), (58), (59), (60), (61), (62), (63);
INSERT INTO bellwether.migrations (version) VALUES (1);
