#include "server/ingest/encode.h"

#include <algorithm>
#include <string>

namespace bellwether::server {
namespace {
constexpr int kOwnValuesAtOnce = 1024;
}

v1::RunDescription ToProto(const RunDescription& run) {
  v1::RunDescription proto;
  proto.set_name(run.name);
  proto.set_uuid(std::string(reinterpret_cast<const char*>(run.uuid.data()), run.uuid.size()));
  proto.set_attempt(run.attempt);
  proto.set_world(run.world);
  proto.set_reporters(run.reporters);
  v1::Layout* const layout = proto.mutable_layout();
  layout->set_layers(static_cast<uint32_t>(run.layout.layers));
  layout->set_heads(static_cast<uint32_t>(run.layout.heads));
  layout->set_kv_heads(static_cast<uint32_t>(run.layout.kv_heads));
  layout->set_head_dim(static_cast<uint32_t>(run.layout.head_dim));
  layout->set_seq_len(static_cast<uint32_t>(run.layout.seq_len));
  layout->set_experts(static_cast<uint32_t>(run.layout.experts));
  v1::Attention* const attention = proto.mutable_attention();
  attention->set_kernel(run.attention.kernel);
  attention->set_score_dtype(run.attention.score_dtype);
  attention->set_centred(run.attention.centred);
  attention->set_qk_norm(run.attention.qk_norm);
  attention->set_softcap(run.attention.softcap);
  attention->set_window(static_cast<uint32_t>(run.attention.window));
  attention->set_causal(run.attention.causal);
  proto.set_framework(run.framework);
  proto.set_model(run.model);
  proto.set_launch_unix_ms(run.launch_unix_ms);
  proto.set_weight_decay(run.weight_decay);
  proto.set_step_origin(run.step_from_attach ? v1::STEP_ORIGIN_ATTACH : v1::STEP_ORIGIN_TRAINER);
  for (const auto& [key, value] : run.labels) (*proto.mutable_labels())[key] = value;
  return proto;
}

v1::Event ToProto(const RunEvent& event) {
  v1::Event proto;
  proto.set_attempt(event.attempt);
  proto.set_step(event.step);
  proto.set_kind(static_cast<v1::EventKind>(event.kind));
  proto.set_value(event.value);
  proto.set_text(event.text);
  proto.set_time_unix_ns(event.time_unix_ns);
  return proto;
}

v1::ClientMessage ToMessage(const RunEvent& event) {
  v1::ClientMessage message;
  *message.mutable_event() = ToProto(event);
  return message;
}

namespace {

// Neighbours among the cells are one message.
void AddOwn(std::span<const float> values, SignalId matrix, const RunRows& rows, v1::Frame* frame) {
  const OwnCell* last = nullptr;
  v1::OwnValues* own = nullptr;
  const size_t size = std::min(values.size(), rows.own_cells.size());
  for (size_t row = 0; row < size; ++row) {
    const OwnCell& cell = rows.own_cells[row];
    const OwnSignal& signal = rows.own_signals[static_cast<size_t>(cell.signal)];
    if (IsNotMeasured(values[row]) || MatrixOf(signal) != matrix) continue;
    const bool columns = HasColumns(signal);
    const bool next =
        last != nullptr && last->signal == cell.signal && own->values_size() < kOwnValuesAtOnce &&
        (columns ? last->layer == cell.layer && last->head + 1 == cell.head : last->layer + 1 == cell.layer);
    if (!next) {
      own = frame->add_own();
      own->set_name(signal.name);
      own->set_granularity(static_cast<v1::Granularity>(signal.granularity));
      own->set_merge(static_cast<v1::Merge>(signal.merge));
      own->set_layer(static_cast<uint32_t>(cell.layer));
      own->set_head(static_cast<uint32_t>(cell.head));
    }
    own->add_values(values[row]);
    last = &cell;
  }
}

}  // namespace

void Describe(const OwnSignal& signal, v1::OwnValues* own) {
  own->set_unit(signal.unit);
  own->set_help(signal.help);
  if (signal.low) own->set_low(*signal.low);
  if (signal.high) own->set_high(*signal.high);
}

v1::ClientMessage ToFrame(const StepSample& sample, const RunRows& rows) {
  v1::ClientMessage message;
  v1::Frame* frame = message.mutable_frame();
  frame->set_attempt(sample.attempt);
  frame->set_step(sample.step);
  frame->set_parts(1);
  frame->set_time_unix_ns(sample.time_unix_ns);
  for (const SignalId id : sample.signals()) {
    const auto values = sample.matrix(id);
    if (FindSignal(id)->granularity == Granularity::kOwn) {
      AddOwn(values, id, rows, frame);
      continue;
    }
    const MatrixShape shape = ShapeOf(*FindSignal(id), sample.layout());
    v1::Block* block = frame->add_blocks();
    block->set_signal(static_cast<v1::Signal>(id));
    block->set_layer_count(static_cast<uint32_t>(shape.layers));
    block->set_head_count(static_cast<uint32_t>(shape.heads));
    block->mutable_values()->Add(values.begin(), values.end());
  }
  return message;
}

v1::ClientMessage ToNames(uint32_t attempt, Granularity granularity, size_t first, std::span<const std::string> names) {
  v1::ClientMessage message;
  v1::Names* const proto = message.mutable_names();
  proto->set_attempt(attempt);
  proto->set_granularity(static_cast<v1::Granularity>(granularity));
  proto->set_first(static_cast<uint32_t>(first));
  proto->mutable_names()->Add(names.begin(), names.end());
  return message;
}

v1::Action ToWire(const Action& action) {
  v1::Action wire;
  wire.set_id(action.id);
  wire.set_attempt(action.attempt);
  wire.set_kind(static_cast<v1::ActionKind>(action.kind));
  for (const int32_t layer : action.scope.layers) wire.mutable_scope()->add_layers(static_cast<uint32_t>(layer));
  for (const Head& head : action.scope.heads) {
    v1::LayerHead* const to = wire.mutable_scope()->add_heads();
    to->set_layer(static_cast<uint32_t>(head.layer));
    to->set_head(static_cast<uint32_t>(head.head));
  }
  wire.set_mode(action.mode);
  wire.set_value(action.value);
  wire.set_apply_at_step(action.apply_at_step);
  wire.set_expires_unix_ns(action.expires_unix_ns);
  wire.set_undoes(action.undoes);
  return wire;
}

}  // namespace bellwether::server
