#!/bin/sh
# ccache_anew.sh CCACHE COMPILER ARGUMENTS...: a header to be precompiled is compiled from what
# it includes now.  ccache (4.7) looks at the one of before, where there is one, instead of at
# the headers, and gives that one back.
before=
for argument; do
  case "$before $argument" in "-o "*.gch | "-o "*.pch) rm -f -- "$argument" ;; esac
  before=$argument
done
exec "$@"
