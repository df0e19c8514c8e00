#include "server/ingest/decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/model/ranges.h"
#include "server/model/row_names.h"
#include "server/util/clean_text.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

template <typename T>
absl::Status OutOfRange(absl::string_view field, const T& value, absl::string_view legal) {
  return absl::InvalidArgumentError(absl::StrCat(field, " = ", value, ": must be ", legal));
}

template <typename T, typename Low, typename High>
absl::Status CheckRange(absl::string_view field, T value, Low low, High high) {
  if (static_cast<int64_t>(value) >= static_cast<int64_t>(low) &&
      static_cast<int64_t>(value) <= static_cast<int64_t>(high)) {
    return absl::OkStatus();
  }
  return OutOfRange(field, value, absl::StrCat("in [", low, ", ", high, "]"));
}

absl::Status CheckText(absl::string_view field, std::string_view text, size_t bytes_max) {
  if (text.size() > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is ", text.size(), " bytes long: at most ", bytes_max));
  }
  for (size_t at = 0; at < text.size();) {
    const size_t length = Utf8Length(text.substr(at));
    const int c = static_cast<unsigned char>(text[at]);
    if (length == 0) {
      return absl::InvalidArgumentError(absl::StrCat(field, " holds byte ", c, " at ", at, ": must be UTF-8"));
    }
    if (c < 0x20 || c == 0x7f) return absl::InvalidArgumentError(absl::StrCat(field, " holds control character ", c));
    at += length;
  }
  return absl::OkStatus();
}

absl::StatusOr<Layout> DecodeLayout(const v1::Layout& layout, const DecodeLimits& limits) {
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.layers", layout.layers(), 1, limits.layers_max));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.heads", layout.heads(), 1, limits.heads_max));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.kv_heads", layout.kv_heads(), 1, layout.heads()));
  if (layout.heads() % layout.kv_heads() != 0) {
    return OutOfRange("hello.run.layout.kv_heads", layout.kv_heads(),
                      absl::StrCat("a divisor of heads = ", layout.heads()));
  }
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.head_dim", layout.head_dim(), 0, limits.head_dim_max));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.seq_len", layout.seq_len(), 0, 1 << 30));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.experts", layout.experts(), 0, limits.experts_max));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.layout.ranks", layout.ranks(), 0, limits.world_max));
  return Layout{.layers = static_cast<int32_t>(layout.layers()),
                .heads = static_cast<int32_t>(layout.heads()),
                .kv_heads = static_cast<int32_t>(layout.kv_heads()),
                .head_dim = static_cast<int32_t>(layout.head_dim()),
                .seq_len = static_cast<int32_t>(layout.seq_len()),
                .experts = static_cast<int32_t>(layout.experts()),
                .ranks = static_cast<int32_t>(layout.ranks())};
}

absl::StatusOr<RunDescription> DecodeRun(const v1::RunDescription& run, const DecodeLimits& limits) {
  if (!IsRunName(run.name())) {
    return absl::InvalidArgumentError(
        absl::StrCat("hello.run.name (", run.name().size(), " bytes): must match [a-zA-Z0-9_.:/-]{1,128}"));
  }
  RunDescription plain;
  if (run.uuid().size() != plain.uuid.size()) {
    return OutOfRange("size of hello.run.uuid", run.uuid().size(), "16 bytes");
  }
  std::memcpy(plain.uuid.data(), run.uuid().data(), plain.uuid.size());
  BW_RETURN_IF_ERROR(CheckRange("hello.run.world", run.world(), 1, limits.world_max));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.reporters", run.reporters(), 1, run.world()));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.attempt", run.attempt(), 0, 1 << 30));
  BW_RETURN_IF_ERROR(CheckRange("hello.run.launch_unix_ms", run.launch_unix_ms(), 0, int64_t{1} << 53));
  BW_RETURN_IF_ERROR(CheckText("hello.run.framework", run.framework(), 64));
  BW_RETURN_IF_ERROR(CheckText("hello.run.model", run.model(), 128));
  BW_RETURN_IF_ERROR(CheckText("hello.run.attention.kernel", run.attention().kernel(), 64));
  BW_RETURN_IF_ERROR(CheckText("hello.run.attention.score_dtype", run.attention().score_dtype(), 16));
  if (run.labels_size() > static_cast<int>(limits.labels_max)) {
    return OutOfRange("number of hello.run.labels", run.labels_size(), absl::StrCat("at most ", limits.labels_max));
  }
  for (const auto& [key, value] : run.labels()) {
    BW_RETURN_IF_ERROR(CheckText("a key of hello.run.labels", key, limits.label_bytes_max));
    BW_RETURN_IF_ERROR(CheckText(absl::StrCat("hello.run.labels[", key, "]"), value, limits.label_bytes_max));
    plain.labels[key] = value;
  }
  BW_ASSIGN_OR_RETURN(plain.layout, DecodeLayout(run.layout(), limits));
  plain.layout.ranks = std::max(plain.layout.ranks, static_cast<int32_t>(run.world()));
  plain.name = run.name();
  plain.attempt = run.attempt();
  plain.launch_unix_ms = run.launch_unix_ms();
  plain.world = run.world();
  plain.reporters = run.reporters();
  const v1::Attention& attention = run.attention();
  plain.attention = {attention.kernel(),
                     attention.score_dtype(),
                     attention.centred(),
                     attention.qk_norm(),
                     attention.causal(),
                     attention.softcap(),
                     static_cast<int32_t>(attention.window())};
  plain.framework = run.framework();
  plain.model = run.model();
  plain.weight_decay = run.weight_decay();
  plain.step_from_attach = run.step_origin() == v1::STEP_ORIGIN_ATTACH;
  return plain;
}

// A sum of two totals that are each what a client says.
uint64_t SaturatingSum(uint64_t a, uint64_t b) {
  return a > std::numeric_limits<uint64_t>::max() - b ? std::numeric_limits<uint64_t>::max() : a + b;
}

absl::Status CheckLosses(absl::string_view field, uint64_t total, const DecodeLimits& limits) {
  if (total <= limits.losses_max) return absl::OkStatus();
  return OutOfRange(field, total, absl::StrCat("in [0, ", limits.losses_max, "]"));
}

absl::StatusOr<HelloMessage> DecodeHello(const v1::Hello& hello, const DecodeLimits& limits) {
  if (hello.protocol() != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("hello.protocol = ", hello.protocol(), ": this server speaks ", kProtocolVersion));
  }
  BW_RETURN_IF_ERROR(CheckText("hello.client_version", hello.client_version(), 64));
  BW_RETURN_IF_ERROR(CheckLosses("hello.dropped_total", hello.dropped_total(), limits));
  BW_RETURN_IF_ERROR(CheckLosses("hello.stripped_total", hello.stripped_total(), limits));
  HelloMessage plain;
  BW_ASSIGN_OR_RETURN(plain.run, DecodeRun(hello.run(), limits));
  BW_RETURN_IF_ERROR(CheckRange("hello.rank", hello.rank(), 0, hello.run().world() - 1));
  plain.rank = hello.rank();
  plain.first_unacked_seq = hello.first_unacked_seq();
  plain.dropped_total = hello.dropped_total();
  plain.stripped_total = hello.stripped_total();
  for (const int kind : hello.capabilities()) {
    // What a newer client can do besides is not asked of it.
    if (kind > 0 && kind < kActionKindEnd) plain.kinds_mask |= uint32_t{1} << kind;
  }
  plain.ranks_agree = hello.ranks_agree();
  if (hello.client_version().starts_with(kImportOf)) {
    plain.import_of = hello.client_version().substr(kImportOf.size());
    plain.import_notifies = hello.import_notifies();
  }
  return plain;
}

// A run may have more rows than this stream was opened with: RowMaps knows how many.
MatrixShape LargestShape(const SignalInfo& signal, const Layout& layout, const DecodeLimits& limits) {
  Layout largest = layout;
  largest.GrowTo({.experts = largest.experts == 0 ? limits.experts_max : 0,
                  .ranks = static_cast<int32_t>(limits.world_max),
                  .tensors = kNamedRowsMax,
                  .modules = kNamedRowsMax});  // None of own signals: no block has them.
  return ShapeOf(signal, largest);
}

// Null: it is of a client that is newer than this server, or of none.
const SignalInfo* SignalOf(const v1::Block& block) {
  const int number = block.signal();
  return number > 0 && number <= std::numeric_limits<uint16_t>::max() ? FindSignal(static_cast<SignalId>(number))
                                                                      : nullptr;
}

absl::Status DecodeBlock(const v1::Block& block, int index, const Layout& layout, const DecodeLimits& limits,
                         RankFrame* frame) {
  const auto field = [index](absl::string_view name) { return absl::StrCat("frame.blocks[", index, "].", name); };
  const SignalInfo* signal = SignalOf(block);
  if (signal == nullptr && block.signal() > 0) {
    frame->unknown_signals.push_back(block.signal());
    frame->unknown_values += static_cast<uint64_t>(block.values_size());
    return absl::OkStatus();
  }
  if (signal == nullptr || signal->derived || signal->granularity == Granularity::kOwn) {
    return OutOfRange(field("signal"), static_cast<int>(block.signal()), "a measured signal of signals.proto");
  }
  const MatrixShape shape = LargestShape(*signal, layout, limits);
  const auto check = [&](absl::string_view what, uint32_t begin, uint32_t count, int32_t size) -> absl::Status {
    BW_RETURN_IF_ERROR(CheckRange(field(absl::StrCat(what, "_count")), count, 1, size));
    return CheckRange(field(absl::StrCat(what, "_begin")), begin, 0, size - static_cast<int64_t>(count));
  };
  BW_RETURN_IF_ERROR(check("layer", block.layer_begin(), block.layer_count(), shape.layers));
  BW_RETURN_IF_ERROR(check("head", block.head_begin(), block.head_count(), shape.heads));
  const int64_t expected = int64_t{block.layer_count()} * block.head_count();
  if (block.values_size() != expected) {
    return OutOfRange(absl::StrCat("number of ", field("values")), block.values_size(),
                      absl::StrCat("layer_count * head_count = ", expected));
  }
  const size_t offset = frame->values.size();
  frame->blocks.push_back({signal->id, static_cast<int32_t>(block.layer_begin()),
                           static_cast<int32_t>(block.layer_count()), static_cast<int32_t>(block.head_begin()),
                           static_cast<int32_t>(block.head_count()), offset});
  frame->values.resize(offset + static_cast<size_t>(expected));
  std::memcpy(frame->values.data() + offset, block.values().data(), static_cast<size_t>(expected) * sizeof(float));
  return absl::OkStatus();
}

absl::Status DecodeOwn(const v1::OwnValues& own, int index, const DecodeLimits& limits, RankFrame* frame) {
  const auto field = [index](absl::string_view name) { return absl::StrCat("frame.own[", index, "].", name); };
  OwnBlock plain{.signal = {.name = own.name(),
                            .unit = own.unit(),
                            .help = own.help(),
                            .granularity = static_cast<Granularity>(own.granularity()),
                            .merge = static_cast<Merge>(own.merge()),
                            .attempt = frame->attempt},
                 .layer = static_cast<int32_t>(own.layer()),
                 .head = static_cast<int32_t>(own.head()),
                 .count = static_cast<size_t>(own.values_size()),
                 .offset = frame->values.size()};
  if (!IsOwnName(own.name())) {
    return absl::InvalidArgumentError(absl::StrCat(field("name"), ": must match [a-z][a-z0-9_./-]{0,63}"));
  }
  BW_RETURN_IF_ERROR(CheckText(field("unit"), own.unit(), 32));
  BW_RETURN_IF_ERROR(CheckText(field("help"), own.help(), limits.text_bytes_max));
  for (const auto& [has, value, name, to] : {std::tuple(own.has_low(), own.low(), "low", &plain.signal.low),
                                             std::tuple(own.has_high(), own.high(), "high", &plain.signal.high)}) {
    if (!has) continue;
    if (!std::isfinite(value)) return OutOfRange(field(name), value, "finite");
    *to = value;
  }
  if (limits.own_low_at_most_high && own.has_low() && own.has_high() && own.low() > own.high()) {
    return OutOfRange(field("low"), own.low(), absl::StrCat("at most ", field("high"), " = ", own.high()));
  }
  MatrixShape all;
  switch (plain.signal.granularity) {
    case Granularity::kRun:
      all = {1, 1};
      break;
    case Granularity::kLayer:
      all = {limits.layers_max, 1};
      break;
    case Granularity::kRank:
      all = {static_cast<int32_t>(limits.world_max), 1};
      break;
    case Granularity::kHead:
      all = {limits.layers_max, limits.heads_max};
      break;
    case Granularity::kExpert:
      all = {limits.layers_max, limits.experts_max};
      break;
    default:
      return OutOfRange(field("granularity"), static_cast<int>(own.granularity()), "RUN, HEAD, LAYER, EXPERT or RANK");
  }
  BW_RETURN_IF_ERROR(CheckRange(field("merge"), static_cast<int>(own.merge()), 1, 3));
  const bool columns = HasColumns(plain.signal);
  BW_RETURN_IF_ERROR(CheckRange(absl::StrCat("number of ", field("values")), own.values_size(), 1,
                                std::min(limits.own_values_max, columns ? all.heads : all.layers)));
  const int64_t rows = columns ? 1 : own.values_size(), each = columns ? own.values_size() : 1;
  BW_RETURN_IF_ERROR(CheckRange(field("layer"), own.layer(), 0, all.layers - rows));
  BW_RETURN_IF_ERROR(CheckRange(field("head"), own.head(), 0, all.heads - each));
  frame->values.insert(frame->values.end(), own.values().begin(), own.values().end());
  frame->own.push_back(std::move(plain));
  return absl::OkStatus();
}

absl::StatusOr<RankFrame> DecodeFrame(const v1::Frame& frame, const Layout& layout, const DecodeLimits& limits) {
  BW_RETURN_IF_ERROR(CheckRange("frame.step", frame.step(), 0, kStepMax));
  BW_RETURN_IF_ERROR(CheckRange("frame.attempt", frame.attempt(), 0, 1 << 30));
  BW_RETURN_IF_ERROR(CheckRange("frame.parts", frame.parts(), 1, limits.parts_max));
  BW_RETURN_IF_ERROR(CheckRange("frame.part", frame.part(), 0, frame.parts() - 1));
  BW_RETURN_IF_ERROR(
      CheckRange("number of frame.blocks", frame.blocks_size(), frame.own_size() > 0 ? 0 : 1, limits.blocks_max));
  BW_RETURN_IF_ERROR(CheckRange("number of frame.own", frame.own_size(), 0, limits.own_max));
  BW_RETURN_IF_ERROR(CheckLosses("frame.dropped_ring_total", frame.dropped_ring_total(), limits));
  BW_RETURN_IF_ERROR(CheckLosses("frame.dropped_window_total", frame.dropped_window_total(), limits));
  BW_RETURN_IF_ERROR(CheckLosses("frame.stripped_total", frame.stripped_total(), limits));
  RankFrame plain;
  plain.attempt = frame.attempt();
  plain.step = frame.step();
  plain.part = frame.part();
  plain.parts = frame.parts();
  plain.time_unix_ns = frame.time_unix_ns();
  plain.partial_rows = frame.partial_rows();
  plain.dropped_total = SaturatingSum(frame.dropped_ring_total(), frame.dropped_window_total());
  plain.stripped_total = frame.stripped_total();
  plain.blocks.reserve(static_cast<size_t>(frame.blocks_size()));
  size_t values = 0;
  for (const v1::Block& block : frame.blocks()) values += static_cast<size_t>(block.values_size());
  plain.values.reserve(values);
  for (int i = 0; i < frame.blocks_size(); ++i) {
    BW_RETURN_IF_ERROR(DecodeBlock(frame.blocks(i), i, layout, limits, &plain));
  }
  for (int i = 0; i < frame.own_size(); ++i) BW_RETURN_IF_ERROR(DecodeOwn(frame.own(i), i, limits, &plain));
  return plain;
}

absl::StatusOr<ShippedGram> DecodeSpectrum(const v1::Spectrum& spectrum, const Layout& layout,
                                           const DecodeLimits& limits) {
  BW_RETURN_IF_ERROR(CheckRange("spectrum.attempt", spectrum.attempt(), 0, 1 << 30));
  BW_RETURN_IF_ERROR(CheckRange("spectrum.step", spectrum.step(), 0, kStepMax));
  BW_RETURN_IF_ERROR(CheckRange("spectrum.layer", spectrum.layer(), 0, layout.layers - 1));
  BW_RETURN_IF_ERROR(CheckRange("spectrum.head", spectrum.head(), 0, layout.heads - 1));
  BW_RETURN_IF_ERROR(CheckRange("spectrum.kind", static_cast<int>(spectrum.kind()), 1, 3));
  BW_RETURN_IF_ERROR(CheckRange("spectrum.n", spectrum.n(), 1, limits.spectrum_rows_max));
  const int64_t expected = int64_t{spectrum.n()} * (spectrum.n() + 1) / 2;
  if (spectrum.upper_size() != expected) {
    return OutOfRange("number of spectrum.upper", spectrum.upper_size(), absl::StrCat("n (n + 1) / 2 = ", expected));
  }
  // Signals do not depend on it, but one that is not a scale says that the sender is confused.
  if (!std::isfinite(spectrum.scale()) || spectrum.scale() < 0) {
    return OutOfRange("spectrum.scale", spectrum.scale(), "finite and at least 0");
  }
  return ShippedGram{spectrum.attempt(),
                     spectrum.step(),
                     {static_cast<int32_t>(spectrum.layer()), static_cast<int32_t>(spectrum.head())},
                     static_cast<GramOf>(spectrum.kind()),
                     static_cast<int32_t>(spectrum.n()),
                     std::make_shared<const std::vector<float>>(spectrum.upper().begin(), spectrum.upper().end())};
}

absl::StatusOr<NamesMessage> DecodeNames(const v1::Names& names) {
  BW_RETURN_IF_ERROR(CheckRange("names.attempt", names.attempt(), 0, 1 << 30));
  const auto granularity = static_cast<Granularity>(names.granularity());
  if (!IsNamedByRanks(granularity)) {
    return OutOfRange("names.granularity", static_cast<int>(names.granularity()), "TENSOR or MODULE");
  }
  BW_RETURN_IF_ERROR(CheckRange("number of names.names", names.names_size(), 1, kNamedRowsMax));
  BW_RETURN_IF_ERROR(CheckRange("names.first", names.first(), 0, kNamedRowsMax - names.names_size()));
  NamesMessage plain{.attempt = names.attempt(),
                     .granularity = granularity,
                     .first = static_cast<int32_t>(names.first()),
                     .names = {}};
  for (const std::string& name : names.names()) {
    const std::string field = absl::StrCat("names.names[", plain.names.size(), "]");
    BW_RETURN_IF_ERROR(CheckRange(absl::StrCat("bytes of ", field), static_cast<int64_t>(name.size()), 1,
                                  static_cast<int64_t>(kRowNameBytesMax)));
    BW_RETURN_IF_ERROR(CheckText(field, name, kRowNameBytesMax));
    plain.names.push_back(name);
  }
  return plain;
}

absl::StatusOr<RunEvent> DecodeEvent(const v1::Event& event, const DecodeLimits& limits) {
  BW_RETURN_IF_ERROR(CheckRange("event.step", event.step(), 0, kStepMax));
  BW_RETURN_IF_ERROR(
      CheckRange("event.kind", static_cast<int>(event.kind()), 1, static_cast<int>(EventKind::kAnnotation)));
  BW_RETURN_IF_ERROR(CheckText("event.text", event.text(), limits.text_bytes_max));
  return RunEvent{event.attempt(), event.step(), static_cast<EventKind>(event.kind()),
                  event.value(),   event.text(), event.time_unix_ns()};
}

}  // namespace

bool IsRunName(std::string_view name) {
  if (name.empty() || name.size() > 128) return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
           c == ':' || c == '/' || c == '-';
  });
}

absl::StatusOr<IngestMessage> Decode(const v1::ClientMessage& message, const Layout* layout,
                                     const DecodeLimits& limits) {
  IngestMessage plain;
  plain.seq = message.seq();
  const auto body = message.body_case();
  if (body == v1::ClientMessage::kHello) {
    if (layout != nullptr) return absl::InvalidArgumentError("hello: only the first message of a stream may be one");
    BW_ASSIGN_OR_RETURN(plain.body, DecodeHello(message.hello(), limits));
    return plain;
  }
  if (layout == nullptr) return absl::FailedPreconditionError("the first message of a stream must be a hello");
  const bool sequenced = body != v1::ClientMessage::kHeartbeat && body != v1::ClientMessage::kBye;
  if (sequenced != (message.seq() != 0)) {
    return OutOfRange("seq", message.seq(), sequenced ? "at least 1" : "0 for heartbeat and bye");
  }
  switch (body) {
    case v1::ClientMessage::kFrame: {
      BW_ASSIGN_OR_RETURN(plain.body, DecodeFrame(message.frame(), *layout, limits));
      return plain;
    }
    case v1::ClientMessage::kNames: {
      BW_ASSIGN_OR_RETURN(plain.body, DecodeNames(message.names()));
      return plain;
    }
    case v1::ClientMessage::kSpectrum: {
      BW_ASSIGN_OR_RETURN(plain.body, DecodeSpectrum(message.spectrum(), *layout, limits));
      return plain;
    }
    case v1::ClientMessage::kEvent: {
      BW_ASSIGN_OR_RETURN(plain.body, DecodeEvent(message.event(), limits));
      return plain;
    }
    case v1::ClientMessage::kActionResult: {
      const v1::ActionResult& result = message.action_result();
      BW_RETURN_IF_ERROR(CheckText("action_result.id", result.id(), kActionIdBytesMax));
      BW_RETURN_IF_ERROR(CheckText("action_result.reason", result.reason(), limits.text_bytes_max));
      BW_RETURN_IF_ERROR(CheckRange("action_result.attempt", result.attempt(), 0, 1 << 30));
      BW_RETURN_IF_ERROR(CheckRange("action_result.step", result.step(), 0, kStepMax));
      plain.body = ActionResultMessage{result.id(), result.attempt(), result.applied(), result.step(), result.reason()};
      return plain;
    }
    case v1::ClientMessage::kHeartbeat:
      BW_RETURN_IF_ERROR(CheckLosses("heartbeat.dropped_total", message.heartbeat().dropped_total(), limits));
      BW_RETURN_IF_ERROR(CheckLosses("heartbeat.stripped_total", message.heartbeat().stripped_total(), limits));
      plain.body = HeartbeatMessage{message.heartbeat().dropped_total(), message.heartbeat().stripped_total()};
      return plain;
    case v1::ClientMessage::kBye: {
      const v1::Bye& bye = message.bye();
      BW_RETURN_IF_ERROR(CheckText("bye.detail", bye.detail(), limits.text_bytes_max));
      BW_RETURN_IF_ERROR(CheckRange("bye.reason", static_cast<int>(bye.reason()), 0, 3));
      plain.body = ByeMessage{static_cast<ByeMessage::Reason>(bye.reason()), bye.detail()};
      return plain;
    }
    default:
      return absl::InvalidArgumentError("the message has no body that this server knows");
  }
}

}  // namespace bellwether::server
