#include "client_lib/sender/frame_encoder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>

#include "bellwether/signal_table.h"

namespace bellwether::client {
namespace {

// Upper bounds of what stands around the values on the wire: the seq, the frame's
// own fields (9 varints of at most 11 bytes with their tags), tag and length of
// the frame; and a block's five varints of at most 6, tags and lengths.
constexpr uint64_t kFrameOverhead = 11 + 9 * 11 + 8;
constexpr uint64_t kBlockOverhead = 5 * 6 + 12;
constexpr uint32_t kNotMeasuredBits = 0x7fc0be11u;  // As ingest.proto says.
constexpr uint64_t kNameOverhead = 1 + 2;           // Tag and length.

static_assert(kEventKindMax == v1::EventKind_MAX);
static_assert(kSpectrumKindMax == v1::SpectrumKind_MAX);
static_assert(kActionKindMax == v1::ActionKind_MAX);
static_assert(kEventKindAttach == v1::EVENT_KIND_ATTACH && kEventKindDetach == v1::EVENT_KIND_DETACH);

void AddBlock(const BlockHeader& b, uint32_t layer_begin, uint32_t layer_count, const float* values, v1::Frame* frame) {
  v1::Block* block = frame->add_blocks();
  block->set_signal(static_cast<v1::Signal>(b.signal));
  block->set_layer_begin(layer_begin);
  block->set_layer_count(layer_count);
  block->set_head_begin(b.head_begin);
  block->set_head_count(b.head_count);
  block->mutable_values()->Add(values, values + uint64_t{layer_count} * b.head_count);
}

bool IsRunSignal(uint32_t signal) {
  const SignalInfo* info = FindSignal(static_cast<SignalId>(signal));
  return info != nullptr && info->granularity == Granularity::kRun;
}

}  // namespace

bool FrameEncoder::Encode(const char* slot, const EncodeContext& context) {
  messages_.clear();
  stripped_ = false;
  bool ok = false;
  switch (reinterpret_cast<const SlotHeader*>(slot)->kind) {
    case SlotKind::kFrame:
      ok = EncodeFrame(slot, context);
      break;
    case SlotKind::kNames:
      ok = EncodeNames(slot, context);
      break;
    case SlotKind::kEvent:
      ok = EncodeEvent(slot, context);
      break;
    case SlotKind::kSpectrum:
      ok = EncodeSpectrum(slot, context);
      break;
    case SlotKind::kActionResult:
      ok = EncodeActionResult(slot, context);
      break;
  }
  if (!ok) messages_.clear();
  return ok;
}

v1::Frame* FrameEncoder::AddPart(const SlotHeader& header, const EncodeContext& context) {
  v1::Frame* frame = messages_.emplace_back().mutable_frame();
  frame->set_attempt(context.attempt);
  frame->set_step(header.step);
  frame->set_part(static_cast<uint32_t>(messages_.size() - 1));
  frame->set_time_unix_ns(header.time_unix_ns);
  frame->set_dropped_ring_total(context.dropped_ring_total);
  frame->set_dropped_window_total(context.dropped_window_total);
  frame->set_partial_rows(header.partial_rows != 0);
  return frame;
}

bool FrameEncoder::EncodeFrame(const char* slot, const EncodeContext& context) {
  const auto& header = *reinterpret_cast<const SlotHeader*>(slot);
  if (header.block_count < 1 || header.block_count > kBlocksMax) return false;
  const auto* blocks = reinterpret_cast<const BlockHeader*>(slot + sizeof(SlotHeader));
  const auto* values = reinterpret_cast<const float*>(slot + SlotValuesOffset(header.block_count));
  const uint64_t part_bytes_max =
      context.message_bytes_max - std::min<uint64_t>(kFrameOverhead, context.message_bytes_max);

  uint64_t values_left = context.values_max;
  v1::Frame* part = nullptr;
  uint64_t part_bytes = 0;
  for (uint32_t i = 0; i < header.block_count; ++i) {
    const BlockHeader& b = blocks[i];
    const uint64_t row_bytes = uint64_t{b.head_count} * sizeof(float);
    if (b.layer_count < 1 || b.head_count < 1 || row_bytes > values_left * sizeof(float)) return false;
    const uint64_t count = uint64_t{b.layer_count} * b.head_count;
    if (count > values_left || kBlockOverhead + row_bytes > part_bytes_max) return false;
    values_left -= count;
    const float* block_values = values;
    values += count;
    if (context.run_signals_only && !IsRunSignal(b.signal)) {
      stripped_ = true;
      continue;
    }
    for (uint32_t layer = 0; layer < b.layer_count;) {
      const bool full = part == nullptr || part->blocks_size() == kPartBlocksMax;
      uint64_t rows = full || part_bytes + kBlockOverhead > part_bytes_max
                          ? 0
                          : (part_bytes_max - part_bytes - kBlockOverhead) / row_bytes;
      if (rows == 0) {
        if (messages_.size() == kPartsMax) return false;
        part = AddPart(header, context);
        part_bytes = 0;
        rows = (part_bytes_max - kBlockOverhead) / row_bytes;
      }
      rows = std::min<uint64_t>(rows, b.layer_count - layer);
      AddBlock(b, b.layer_begin + layer, static_cast<uint32_t>(rows), block_values + uint64_t{layer} * b.head_count,
               part);
      part_bytes += kBlockOverhead + rows * row_bytes;
      layer += static_cast<uint32_t>(rows);
    }
  }
  if (header.n > 0 && !AddOwn(slot, context.values_max - values_left, context)) return false;
  for (v1::ClientMessage& message : messages_) {
    message.mutable_frame()->set_parts(static_cast<uint32_t>(messages_.size()));
    message.mutable_frame()->set_stripped_total(context.stripped_total + (stripped_ ? 1 : 0));
  }
  return !messages_.empty();
}

bool FrameEncoder::AddOwn(const char* slot, uint64_t values_count, const EncodeContext& context) {
  const auto& header = *reinterpret_cast<const SlotHeader*>(slot);
  const uint64_t begin = SlotOwnOffset(header.block_count, values_count);
  if (header.n > BW_OWN_MAX || begin + header.text_bytes[0] > context.slot_bytes) return false;
  own_seen_ = true;
  std::string_view left(slot + begin, header.text_bytes[0]);
  v1::Frame* part = messages_.empty() ? nullptr : messages_.back().mutable_frame();
  uint64_t part_bytes = part == nullptr ? 0 : kFrameOverhead + part->ByteSizeLong();
  for (uint32_t i = 0; i < header.n; ++i) {
    OwnHeader own;
    if (left.size() < sizeof(own)) return false;
    std::memcpy(&own, left.data(), sizeof(own));
    if (own.count > BW_OWN_VALUES_MAX || OwnBytes(own) > left.size()) return false;
    std::string_view content = left.substr(sizeof(own));
    left.remove_prefix(OwnBytes(own));
    if (context.run_signals_only && own.granularity != static_cast<uint32_t>(Granularity::kRun)) {
      stripped_ = true;
      continue;
    }
    const uint64_t bytes = OwnBytes(own) + kBlockOverhead;
    if (part == nullptr || part_bytes + bytes > context.message_bytes_max || part->own_size() == BW_OWN_MAX) {
      if (messages_.size() == kPartsMax) return false;
      part = AddPart(header, context);
      // Servers that do not know own values take no frame without a block: one that measures nothing.
      const float nothing = std::bit_cast<float>(kNotMeasuredBits);
      AddBlock({.signal = static_cast<uint32_t>(SignalId::kLoss), .head_count = 1}, 0, 1, &nothing, part);
      part_bytes = 2 * kFrameOverhead;
    }
    part_bytes += bytes;
    v1::OwnValues* to = part->add_own();
    to->set_granularity(static_cast<v1::Granularity>(own.granularity));
    to->set_merge(static_cast<v1::Merge>(own.merge));
    to->set_layer(own.layer);
    to->set_head(own.head);
    if ((own.limits & 1) != 0) to->set_low(own.low);
    if ((own.limits & 2) != 0) to->set_high(own.high);
    to->mutable_values()->Resize(static_cast<int>(own.count), 0);
    std::memcpy(to->mutable_values()->mutable_data(), content.data(), own.count * sizeof(float));
    content.remove_prefix(own.count * sizeof(float));
    to->set_name(std::string(content.substr(0, own.text_bytes[0])));
    content.remove_prefix(own.text_bytes[0]);
    to->set_unit(std::string(content.substr(0, own.text_bytes[1])));
    content.remove_prefix(own.text_bytes[1]);
    to->set_help(std::string(content.substr(0, own.text_bytes[2])));
  }
  return true;
}

bool FrameEncoder::EncodeNames(const char* slot, const EncodeContext& context) {
  const auto& header = *reinterpret_cast<const SlotHeader*>(slot);
  const uint32_t bytes = header.text_bytes[0];
  if (bytes > BW_NAMES_BYTES_MAX) return false;
  std::string_view left(slot + sizeof(SlotHeader), bytes);
  v1::Names* names = nullptr;
  uint64_t message_bytes = 0;
  for (uint32_t row = 0; row < header.n; ++row) {
    const size_t end = left.find('\0');
    if (end == std::string_view::npos) return false;
    const uint64_t name_bytes = end + kNameOverhead;
    if (names == nullptr || message_bytes + name_bytes > context.message_bytes_max) {
      names = messages_.emplace_back().mutable_names();
      names->set_attempt(context.attempt);
      names->set_granularity(static_cast<v1::Granularity>(header.event_kind));
      names->set_first(header.layer + row);
      message_bytes = kFrameOverhead;
    }
    names->add_names(std::string(left.substr(0, end)));
    message_bytes += name_bytes;
    left.remove_prefix(end + 1);
  }
  return left.empty() && !messages_.empty();
}

bool FrameEncoder::EncodeEvent(const char* slot, const EncodeContext& context) {
  const auto& header = *reinterpret_cast<const SlotHeader*>(slot);
  if (header.text_bytes[0] > kReasonMax) return false;
  double value;
  std::memcpy(&value, slot + sizeof(SlotHeader), sizeof(value));
  v1::Event* event = messages_.emplace_back().mutable_event();
  event->set_attempt(context.attempt);
  event->set_step(header.step);
  event->set_kind(static_cast<v1::EventKind>(header.event_kind));
  event->set_value(value);
  event->set_text(slot + sizeof(SlotHeader) + sizeof(value), header.text_bytes[0]);
  event->set_time_unix_ns(header.time_unix_ns);
  return true;
}

bool FrameEncoder::EncodeSpectrum(const char* slot, const EncodeContext& context) {
  const auto& header = *reinterpret_cast<const SlotHeader*>(slot);
  const uint64_t count = uint64_t{header.n} * (uint64_t{header.n} + 1) / 2;
  if (header.n < 1 || count > context.values_max ||
      count * sizeof(float) + kFrameOverhead > context.message_bytes_max) {
    return false;
  }
  const auto* upper = reinterpret_cast<const float*>(slot + SlotValuesOffset(0));
  v1::Spectrum* spectrum = messages_.emplace_back().mutable_spectrum();
  spectrum->set_attempt(context.attempt);
  spectrum->set_step(header.step);
  spectrum->set_layer(header.layer);
  spectrum->set_head(header.head);
  spectrum->set_kind(static_cast<v1::SpectrumKind>(header.event_kind));
  spectrum->set_n(header.n);
  spectrum->mutable_upper()->Add(upper, upper + count);
  spectrum->set_scale(header.scale);
  return true;
}

bool FrameEncoder::EncodeActionResult(const char* slot, const EncodeContext& context) {
  const auto& header = *reinterpret_cast<const SlotHeader*>(slot);
  if (header.text_bytes[0] > kActionIdMax || header.text_bytes[1] > kReasonMax) return false;
  const char* text = slot + sizeof(SlotHeader);
  v1::ActionResult* result = messages_.emplace_back().mutable_action_result();
  result->set_id(text, header.text_bytes[0]);
  result->set_attempt(context.attempt);
  result->set_applied(header.event_kind != 0);
  result->set_step(header.step);
  result->set_reason(text + header.text_bytes[0], header.text_bytes[1]);
  return true;
}

}  // namespace bellwether::client
