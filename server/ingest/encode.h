// encode.h: plain structs onto the wire.
//
// For recordings, for trainers and for queries.  Total functions: every value has a
// counterpart; nothing is validated here.

#ifndef BELLWETHER_SERVER_INGEST_ENCODE_H_
#define BELLWETHER_SERVER_INGEST_ENCODE_H_

#include "bellwether/v1/ingest.pb.h"
#include "server/model/action.h"
#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

v1::RunDescription ToProto(const RunDescription& run);
v1::Event ToProto(const RunEvent& event);

// As a client would say it; its seq is left to the caller.
v1::ClientMessage ToMessage(const RunEvent& event);
// `rows` say what the sample's rows of own signals are.
v1::ClientMessage ToFrame(const StepSample& sample, const RunRows& rows);
// Adds what people read of the signal.
void Describe(const OwnSignal& signal, v1::OwnValues* own);
v1::ClientMessage ToNames(uint32_t attempt, Granularity granularity, size_t first, std::span<const std::string> names);

// What a trainer needs to apply it; nothing of its past or its reasons.
v1::Action ToWire(const Action& action);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_ENCODE_H_
