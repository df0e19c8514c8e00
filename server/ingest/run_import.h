// run_import.h: recorded runs into the server and out of it.

#ifndef BELLWETHER_SERVER_INGEST_RUN_IMPORT_H_
#define BELLWETHER_SERVER_INGEST_RUN_IMPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/engine/ports/run_control.h"
#include "server/ingest/decode_limits.h"
#include "server/ingest/ingest_sink.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"

namespace bellwether::server {

// Feeds a recording to the engine as its ranks would have: the same checks,
// the same log, the same judgement.  Not thread-safe.
//
// One that was cut off (a server was killed, the caller went away) leaves a run that
// has not ended and knows the recording's first hello.  The same import again goes on
// where that stopped: its messages have the same numbers, and what is there already
// is a duplicate like any other.  Silence and late ranks are not judged until then, for a
// quarter of an hour.  After that its open steps are closed with what they have, and frames
// of their other ranks that still come are late.
//
// A recording that is refused (damaged, bytes behind its end, two runs in one) ends its
// run at once in the same way.
//
// `as_name` empty: the recorded name and uuid; else a run of that name, with
// a uuid that follows from the name.  `notify`: people are told of its alerts.
// `sink` and `runs`, its table, must outlive the import.
std::unique_ptr<RunImport> ImportRecording(ImportSink* sink, const RunTable* runs, const DecodeLimits& limits,
                                           std::string as_name, bool notify);

// Writes a run as a .bwrun of one rank: its merged steps and its events, in
// the order of steps.  ABORTED: the sink refused.
absl::Status ExportRecording(const RunRecord& run, const RunRows& rows, EventReader* events, const SeriesStore& series,
                             const std::function<bool(std::string_view)>& sink);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_RUN_IMPORT_H_
