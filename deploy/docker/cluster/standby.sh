#!/bin/bash
# The standby: a copy of the primary (PGHOST, PGPORT) at the first start, then its follower.
#   To promote it, once the primary is gone for good: psql -c 'SELECT pg_promote()'.
# Promoted it has no standby of its own, and commits wait for none.
set -euo pipefail
if [ ! -d "$PGDATA" ]; then
  rm -rf "$PGDATA.new"  # What an interrupted copy left.
  PGPASSWORD=$(cat "$REPLICATION_PASSWORD_FILE") pg_basebackup -D "$PGDATA.new" -R -X stream -c fast -S standby \
    -d "user=replication application_name=standby"
  printf "synchronous_standby_names = ''\n" >> "$PGDATA.new/postgresql.auto.conf"
  mv "$PGDATA.new" "$PGDATA"
fi
# The copy is another server: where the first one was is in its configuration, not in the environment.
unset PGHOST PGPORT
exec postgres "$@"
