#include "server/engine/run_publisher.h"

#include <algorithm>

namespace bellwether::server {

void RunPublisher::Publish(uint32_t silent_ranks) {
  if (!changed_) return;
  changed_ = false;
  const RunRecord& record = state_.record();
  // A run that had ended before it was loaded shows nothing new: its snapshot stays.
  const RunSnapshotPtr shown = state_.stepped() || !record.ended ? nullptr : parts_.table->Get(record.id);
  if (shown != nullptr) {
    auto snapshot = std::make_shared<RunSnapshot>(*shown);
    snapshot->record = record;
    snapshot->alerts_firing = static_cast<uint32_t>(parts_.alerts->List(record.id, true).size());
    snapshot->ranks_reporting = 0;
    snapshot->version = version_ = std::max(version_, shown->version) + 1;
    AddEvents(snapshot.get());
    parts_.table->Publish(std::move(snapshot));
    return;
  }
  const RunJudge& judge = state_.judge();
  auto snapshot = std::make_shared<RunSnapshot>();
  snapshot->record = record;
  snapshot->eta = judge.eta();
  snapshot->alerts_firing = judge.alerts_firing();
  const uint32_t reporting = state_.merge().reporting();
  snapshot->ranks_reporting = record.ended ? 0 : reporting - std::min(reporting, silent_ranks);
  snapshot->version = ++version_;
  if (heads_version_ != state_.heads_version()) {
    heads_ = std::make_shared<StepSample>(state_.heads());
    heads_version_ = state_.heads_version();
  }
  snapshot->heads = heads_;
  if (!state_.newest().signals().empty()) snapshot->newest = std::make_shared<StepSample>(state_.newest());
  const Layout& layout = record.description.layout;
  snapshot->head_stage.reserve(static_cast<size_t>(layout.layers * layout.heads));
  for (int32_t layer = 0; layer < layout.layers; ++layer) {
    for (int32_t head = 0; head < layout.heads; ++head) {
      snapshot->head_stage.push_back(static_cast<uint8_t>(judge.stage_of(layer, head)));
    }
  }
  snapshot->totals = state_.totals();
  snapshot->rows = state_.rows();
  if (row_values_version_ != state_.row_values_version()) {
    row_values_ = std::make_shared<RowValues>(state_.row_values());
    row_values_version_ = state_.row_values_version();
  }
  snapshot->row_values = row_values_;
  AddEvents(snapshot.get());
  parts_.table->Publish(std::move(snapshot));
}

void RunPublisher::AddEvents(RunSnapshot* snapshot) {
  const std::pair<uint64_t, size_t> version{state_.events_stored(), state_.new_events().size()};
  if (events_ == nullptr || events_version_ != version) {
    events_ = std::make_shared<const std::vector<RunEvent>>(state_.new_events());
    events_version_ = version;
  }
  snapshot->events_stored = state_.events_stored();
  snapshot->events_new = events_;
}

void RunPublisher::PublishRecord(const RunRecord& record, const LiveRunParts& parts) {
  auto snapshot = std::make_shared<RunSnapshot>();
  snapshot->record = record;
  if (!record.ended) return parts.table->Publish(std::move(snapshot));  // The run itself shows more, soon.
  snapshot->alerts_firing = static_cast<uint32_t>(parts.alerts->List(record.id, true).size());
  snapshot->newest = ReadNewestLoss(record, *parts.series);
  parts.table->Publish(std::move(snapshot));
}

}  // namespace bellwether::server
