// WatchAlerts and WatchRun.
#include <string>
#include <utility>

#include "server/query/convert.h"
#include "server/query/sibling_view.h"
#include "server/query/still_allowed.h"
#include "server/query/stream_handlers.h"

namespace bellwether::server {

bool AlertStream::Pump(int64_t) {
  if (!StillAllowed(grant_.get(), "WatchAlerts", run_, stream_.get())) return false;
  while (stream_->ready()) {
    absl::StatusOr<AlertCursor::Item> item = cursor_->Next();
    if (!item.ok()) {
      stream_->End(ToGrpc(item.status()));
      break;
    }
    v1::WatchAlertsResponse response;
    switch (item->kind) {
      case AlertCursor::Item::kNone:
        return true;
      case AlertCursor::Item::kTransition:
        *response.mutable_transition() = ToProto(item->transition, *engine_->stores().runs);
        HideSiblings(engine_->stores(), grant_.get(), item->transition.run, response.mutable_transition());
        break;
      case AlertCursor::Item::kCaughtUp:
        response.set_caught_up(true);
        response.set_caught_up_id(item->after);
        break;
      case AlertCursor::Item::kResync:
        response.set_resync_from(item->after);
        break;
    }
    stream_->Send(std::move(response));
    if (item->kind == AlertCursor::Item::kResync) stream_->End(grpc::Status::OK);
  }
  return !stream_->ending();
}

bool RunStream::Pump(int64_t now_monotonic_ns) {
  const RunSnapshotPtr run = engine_->stores().runs->Get(run_);
  if (run == nullptr) {
    const bool moved = engine_->stores().router != nullptr;  // Ask again, and it is found.
    stream_->End({moved ? grpc::StatusCode::UNAVAILABLE : grpc::StatusCode::NOT_FOUND,
                  "run \"" + request_.run() + "\": it has left this server"});
    return false;
  }
  if (!StillAllowed(grant_.get(), "WatchRun", run->record.description.name, stream_.get())) return false;
  if (!stream_->ready()) return true;
  if (run == sent_ || now_monotonic_ns < next_ns_) return true;
  sent_ = run;
  next_ns_ = now_monotonic_ns + int64_t{request_.min_interval_ms()} * 1'000'000;
  stream_->Send(engine_->Watch(*engine_->stores().alerts->WithoutMuted(run), request_));
  if (run->record.ended) stream_->End(grpc::Status::OK);
  return !stream_->ending();
}

}  // namespace bellwether::server
