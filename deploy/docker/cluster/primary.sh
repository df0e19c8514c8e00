#!/bin/bash
# The primary's initialisation: the files of deploy/postgres (SCHEMA), who may come, and that a
# commit waits for the standby.  The image's entrypoint runs it once.
set -euo pipefail
files=(001_tables.sql engine_postgresql.sql roles.sql)
for later in "$SCHEMA"/[0-9]*.sql; do
  [ "${later##*/}" = 001_tables.sql ] || files+=("${later##*/}")
done
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" "${files[@]/#/-f$SCHEMA/}"
printf 'host replication replication all scram-sha-256\n' >> "$PGDATA/pg_hba.conf"
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
  -v server="$(cat "$SERVER_PASSWORD_FILE")" -v replication="$(cat "$REPLICATION_PASSWORD_FILE")" <<'SQL'
CREATE ROLE bellwether LOGIN PASSWORD :'server' IN ROLE bellwether_server;
CREATE ROLE replication LOGIN REPLICATION PASSWORD :'replication';
SELECT pg_create_physical_replication_slot('standby');
-- Last, and in force from the next start on: from then on every commit waits.
ALTER SYSTEM SET max_slot_wal_keep_size = '8GB';
ALTER SYSTEM SET synchronous_standby_names = 'standby';
SQL
