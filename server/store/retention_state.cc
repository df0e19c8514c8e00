#include "server/store/retention_state.h"

#include "server/store/rocks_database.h"
#include "server/util/byte_io.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kRetentionVersion = 2;  // 1 did not say whether it was whole.
constexpr size_t kMarkBytesMin = 3;

void PutPoint(const HistoryPoint& point, ByteWriter* out) {
  out->PutVarint(point.first);
  out->PutSigned(point.second);
}
HistoryPoint GetPoint(ByteReader* in) {
  const auto attempt = static_cast<uint32_t>(in->GetVarint());
  return {attempt, in->GetSigned()};
}

}  // namespace

std::string RetentionKey(RunId run) { return KeyBuilder('x').U64(run).key(); }

std::string EncodeRetentionState(const RetentionState& state) {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Put(kRetentionVersion);
  for (const HistoryPoint& point : {state.rounded, state.summarized, state.dropped}) PutPoint(point, &out);
  out.PutVarint(state.marks.size());
  for (const RetentionState::Mark& mark : state.marks) {
    out.PutSigned(mark.time_unix_ns);
    PutPoint(mark.newest, &out);
  }
  out.Put(state.whole);
  return bytes;
}

absl::StatusOr<RetentionState> DecodeRetentionState(std::string_view bytes) {
  ByteReader in(bytes);
  RetentionState state;
  const auto version = in.Get<uint8_t>();
  for (HistoryPoint* const point : {&state.rounded, &state.summarized, &state.dropped}) *point = GetPoint(&in);
  state.marks.resize(in.GetCount(kMarkBytesMin));
  for (RetentionState::Mark& mark : state.marks) {
    mark.time_unix_ns = in.GetSigned();
    mark.newest = GetPoint(&in);
  }
  if (version >= 2) state.whole = in.Get<bool>();
  if (!in.done() || version < 1 || version > kRetentionVersion) return absl::DataLossError("stored retention: damaged");
  return state;
}

}  // namespace bellwether::server
