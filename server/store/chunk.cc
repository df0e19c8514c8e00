#include "server/store/chunk.h"

#include <zstd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "server/store/byte_io.h"
#include "server/store/step_sample.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kVersion = 1;

struct FreeContext {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

absl::Status Damaged() { return absl::DataLossError("stored chunk: damaged"); }

// Runs of equal distances: a regular chunk is one run.
void PutSteps(std::span<const int64_t> steps, ByteWriter* out) {
  out->PutVarint(steps.size());
  out->PutSigned(steps[0]);
  for (size_t i = 1; i < steps.size();) {
    const auto distance = static_cast<uint64_t>(steps[i]) - static_cast<uint64_t>(steps[i - 1]);
    size_t run = 1;
    while (i + run < steps.size() &&
           static_cast<uint64_t>(steps[i + run]) - static_cast<uint64_t>(steps[i + run - 1]) == distance) {
      ++run;
    }
    out->PutVarint(run);
    out->PutVarint(distance);
    i += run;
  }
}

bool GetSteps(ByteReader* in, std::vector<int64_t>* steps) {
  const uint64_t count = in->GetVarint();
  if (!in->ok() || count < 1 || count > kChunkStepsMax) return false;
  steps->clear();
  steps->reserve(count);
  steps->push_back(in->GetSigned());
  while (in->ok() && steps->size() < count) {
    const uint64_t run = in->GetVarint();
    const uint64_t distance = in->GetVarint();
    if (!in->ok() || run < 1 || run > count - steps->size()) return false;
    for (uint64_t i = 0; i < run; ++i) {
      const auto next = static_cast<int64_t>(static_cast<uint64_t>(steps->back()) + distance);
      if (next <= steps->back()) return false;
      steps->push_back(next);
    }
  }
  return in->ok();
}

bool GetShape(ByteReader* in, std::vector<int64_t>* steps, size_t* cells) {
  if (in->Get<uint8_t>() != kVersion || !GetSteps(in, steps)) return false;
  const uint64_t n = in->GetVarint();
  if (!in->ok() || n < 1 || n > kChunkCellsMax || n * steps->size() > kChunkValuesMax) return false;
  *cells = n;
  return true;
}

}  // namespace

std::string EncodeChunk(const ChunkInput& input) {
  thread_local std::unique_ptr<ZSTD_CCtx, FreeContext> context(ZSTD_createCCtx());
  thread_local std::vector<uint8_t> planes;
  const size_t n = input.steps.size() * input.cells;
  planes.resize(4 * n);
  uint8_t* const p0 = planes.data();
  uint8_t* const p1 = p0 + n;
  uint8_t* const p2 = p1 + n;
  uint8_t* const p3 = p2 + n;
  thread_local std::vector<uint32_t> words;
  words.resize(n);
  for (size_t t = 0; t < input.steps.size(); ++t) {
    const float* const now = input.values + t * input.stride;
    uint32_t* const out = words.data() + t * input.cells;
    if (t == 0) {
      std::memcpy(out, now, input.cells * sizeof(float));
      continue;
    }
    const float* const before = now - input.stride;
    for (size_t c = 0; c < input.cells; ++c) {
      out[c] = std::bit_cast<uint32_t>(now[c]) ^ std::bit_cast<uint32_t>(before[c]);
    }
  }
  const uint32_t* const w = words.data();
  for (size_t i = 0; i < n; ++i) {
    p0[i] = static_cast<uint8_t>(w[i]);
    p1[i] = static_cast<uint8_t>(w[i] >> 8);
    p2[i] = static_cast<uint8_t>(w[i] >> 16);
    p3[i] = static_cast<uint8_t>(w[i] >> 24);
  }

  std::string bytes;
  ByteWriter out(&bytes);
  out.Put(kVersion);
  PutSteps(input.steps, &out);
  out.PutVarint(input.cells);
  const size_t head = bytes.size();
  bytes.resize(head + ZSTD_compressBound(planes.size()));
  const size_t size = ZSTD_compressCCtx(context.get(), bytes.data() + head, bytes.size() - head, planes.data(),
                                        planes.size(), input.zstd_level);
  // With an output of compressBound() bytes it fails on lack of memory only.
  bytes.resize(ZSTD_isError(size) ? head : head + size);
  return bytes;
}

absl::Status DecodeChunk(std::string_view bytes, Chunk* chunk) {
  ByteReader in(bytes);
  if (!GetShape(&in, &chunk->steps, &chunk->cells)) return Damaged();
  const size_t n = chunk->steps.size() * chunk->cells;
  thread_local std::unique_ptr<ZSTD_DCtx, FreeContext> context(ZSTD_createDCtx());
  thread_local std::vector<uint8_t> planes;
  planes.resize(4 * n);
  const std::string_view frame = in.GetRaw(in.remaining());
  const size_t size = ZSTD_decompressDCtx(context.get(), planes.data(), planes.size(), frame.data(), frame.size());
  if (ZSTD_isError(size) || size != planes.size()) return Damaged();
  const uint8_t* const p0 = planes.data();
  const uint8_t* const p1 = p0 + n;
  const uint8_t* const p2 = p1 + n;
  const uint8_t* const p3 = p2 + n;
  thread_local std::vector<uint32_t> words;
  words.resize(n);
  for (size_t i = 0; i < n; ++i) {
    words[i] = uint32_t{p0[i]} | uint32_t{p1[i]} << 8 | uint32_t{p2[i]} << 16 | uint32_t{p3[i]} << 24;
  }
  for (size_t i = chunk->cells; i < n; ++i) words[i] ^= words[i - chunk->cells];
  chunk->values.resize(n);
  std::memcpy(chunk->values.data(), words.data(), n * sizeof(float));
  return absl::OkStatus();
}

absl::Status DecodeChunkSteps(std::string_view bytes, std::vector<int64_t>* steps) {
  ByteReader in(bytes);
  size_t cells = 0;
  return GetShape(&in, steps, &cells) ? absl::OkStatus() : Damaged();
}

ChunkSummary Summarize(const ChunkInput& input) {
  ChunkSummary summary;
  summary.first_step = input.steps.front();
  summary.last_step = input.steps.back();
  summary.steps = static_cast<uint32_t>(input.steps.size());
  summary.series.resize(input.cells);
  for (size_t c = 0; c < input.cells; ++c) {
    SeriesSummary& s = summary.series[c];
    s.last = NotMeasured();
    float low = std::numeric_limits<float>::infinity(), high = -low;
    double sum = 0;
    for (size_t t = 0; t < input.steps.size(); ++t) {
      const float value = input.values[t * input.stride + c];
      if (IsNotMeasured(value)) continue;
      s.last = value;
      if (std::isnan(value)) {
        ++s.nans;
        continue;
      }
      ++s.numbers;
      low = std::min(low, value);
      high = std::max(high, value);
      sum += value;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    s.min = s.numbers > 0 ? low : nan;
    s.max = s.numbers > 0 ? high : nan;
    s.mean = s.numbers > 0 ? static_cast<float>(sum / s.numbers) : nan;
  }
  return summary;
}

std::string EncodeSummary(const ChunkSummary& summary) {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Put(kVersion);
  out.PutSigned(summary.first_step);
  out.PutSigned(summary.last_step);
  out.PutVarint(summary.steps);
  out.PutVarint(summary.series.size());
  for (const SeriesSummary& s : summary.series) {
    out.Put(s.min);
    out.Put(s.mean);
    out.Put(s.max);
    out.Put(s.last);
    out.Put(s.numbers);
    out.Put(s.nans);
  }
  return bytes;
}

absl::Status DecodeSummary(std::string_view bytes, ChunkSummary* summary) {
  ByteReader in(bytes);
  const bool known = in.Get<uint8_t>() == kVersion;
  summary->first_step = in.GetSigned();
  summary->last_step = in.GetSigned();
  summary->steps = static_cast<uint32_t>(in.GetVarint());
  summary->series.resize(in.GetCount(20));
  for (SeriesSummary& s : summary->series) {
    s.min = in.Get<float>();
    s.mean = in.Get<float>();
    s.max = in.Get<float>();
    s.last = in.Get<float>();
    s.numbers = in.Get<uint16_t>();
    s.nans = in.Get<uint16_t>();
  }
  return known && in.done() && summary->first_step <= summary->last_step ? absl::OkStatus() : Damaged();
}

}  // namespace bellwether::server
