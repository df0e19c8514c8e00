#include "server/store/chunk.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "server/util/byte_io.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kChunkVersion = 2;
constexpr size_t kPlanes = 4;
// The byte after the shape: how words were made, and which planes are as they are.
constexpr uint8_t kWalked = 1;
constexpr int kKeptShift = 4;
constexpr uint8_t kNoFlags = 0x0e;
// Fewer values than this do not pay for a compressed frame's own bytes.
constexpr size_t kCompressedValuesMin = 16;
// Matches shorter than the longest that zstd asks for cost more than the bytes
// they replace: what repeats here are whole constant stretches.
constexpr int kZstdMatchMin = 7;
constexpr int kZstdHashLog = 8;

struct FreeContext {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

absl::Status DamagedChunk() { return absl::DataLossError("stored chunk: damaged"); }

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
  if (in->Get<uint8_t>() != kChunkVersion || !GetSteps(in, steps)) return false;
  const uint64_t n = in->GetVarint();
  if (!in->ok() || n < 1 || n > kChunkCellsMax || n * steps->size() > kChunkValuesMax) return false;
  *cells = n;
  return true;
}

// ---- words ----

uint32_t Rotated(float value) { return std::rotl(std::bit_cast<uint32_t>(value), 1); }

// Rises with the value: negative floats count down from the middle.
uint32_t Ordered(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  return static_cast<uint32_t>(bits) ^ (static_cast<uint32_t>(bits >> 31) | 0x80000000u);
}
uint32_t BitsOfOrdered(uint32_t ordered) {
  return ordered ^ (~static_cast<uint32_t>(static_cast<int32_t>(ordered) >> 31) | 0x80000000u);
}

uint32_t Distance(float from, float to) {
  const auto difference = static_cast<int32_t>(Ordered(to) - Ordered(from));
  return static_cast<uint32_t>(difference) << 1 ^ static_cast<uint32_t>(difference >> 31);
}

// Word i is of step i / cells; of few cells, which need not be alike, each has
// its words together.
constexpr size_t kFewCells = 8;

void MakeWords(const ChunkInput& input, bool walked, uint32_t* words) {
  const size_t rows = input.steps.size();
  const bool apart = input.cells < kFewCells;
  for (size_t t = 0; t < rows; ++t) {
    const float* const now = input.values + t * input.stride;
    const float* const before = walked && t > 0 ? now - input.stride : nullptr;
    if (apart) {
      for (size_t c = 0; c < input.cells; ++c) {
        words[c * rows + t] = before != nullptr ? Distance(before[c], now[c]) : Rotated(now[c]);
      }
      continue;
    }
    uint32_t* const out = words + t * input.cells;
    if (before != nullptr) {
      for (size_t c = 0; c < input.cells; ++c) out[c] = Distance(before[c], now[c]);
    } else {
      for (size_t c = 0; c < input.cells; ++c) out[c] = Rotated(now[c]);
    }
  }
}

// Of `series` series that take turns, back to the bits of the values.
void UndoWords(bool walked, size_t series, uint32_t* w, size_t n) {
  for (size_t i = 0; i < (walked ? series : n); ++i) w[i] = std::rotr(w[i], 1);
  if (!walked) return;
  for (size_t i = 0; i < series; ++i) w[i] = Ordered(std::bit_cast<float>(w[i]));
  for (size_t i = series; i < n; ++i) w[i] = w[i - series] + (w[i] >> 1 ^ (~(w[i] & 1) + 1));
  for (size_t i = 0; i < n; ++i) w[i] = BitsOfOrdered(w[i]);
}

void PutValues(const uint32_t* words, Chunk* chunk) {
  const size_t rows = chunk->steps.size(), cells = chunk->cells;
  chunk->values.resize(rows * cells);
  if (cells >= kFewCells) {
    std::memcpy(chunk->values.data(), words, rows * cells * sizeof(float));
    return;
  }
  for (size_t t = 0; t < rows; ++t) {
    for (size_t c = 0; c < cells; ++c) std::memcpy(&chunk->values[t * cells + c], &words[c * rows + t], sizeof(float));
  }
}

// ---- how to write them ----

constexpr size_t kSampledValues = 256;

// n log2 n, for counts of sampled bytes.
const std::array<float, 2 * kSampledValues + 1>& CountBits() {
  static const auto table = [] {
    std::array<float, 2 * kSampledValues + 1> bits{};
    for (size_t n = 2; n < bits.size(); ++n) bits[n] = static_cast<float>(n) * std::log2(static_cast<float>(n));
    return bits;
  }();
  return table;
}

// How often each byte occurs in each plane of sampled words.
class PlaneCounts {
 public:
  void Add(uint32_t word) {
    for (size_t p = 0; p < kPlanes; ++p) ++counts_[p][word >> 8 * p & 0xff];
    ++total_;
  }
  // Entropy of a plane in bits a byte; too low by what a small sample hides.
  std::array<float, kPlanes> Bits() const {
    const auto& bits = CountBits();
    std::array<float, kPlanes> result{};
    for (size_t p = 0; p < kPlanes; ++p) {
      std::array<float, 4> sum{};  // Four chains: the additions do not wait for each other.
      for (size_t i = 0; i < 256; i += 4) {
        for (size_t j = 0; j < 4; ++j) sum[j] += bits[counts_[p][i + j]];
      }
      result[p] = (bits[total_] - (sum[0] + sum[1] + sum[2] + sum[3])) / static_cast<float>(total_);
    }
    return result;
  }
  size_t total() const { return total_; }

 private:
  std::array<std::array<uint16_t, 256>, kPlanes> counts_{};
  size_t total_ = 0;
};

// The flag byte.
uint8_t Choose(const ChunkInput& input) {
  // Of 256 random bytes 7.17 bits are seen; below 6.9 a plane is worth zstd.
  constexpr float kRandomBits = 6.9f;
  constexpr size_t kSampledMin = 224;
  constexpr uint8_t kKeepAll = ((1 << kPlanes) - 1) << kKeptShift;
  const size_t rows = input.steps.size();
  if (rows * input.cells < kCompressedValuesMin) return kKeepAll;
  const size_t cell_stride = std::max<size_t>(1, input.cells / 8);
  const size_t cells_each = (input.cells + cell_stride - 1) / cell_stride;
  const size_t row_stride = std::max<size_t>(1, rows * cells_each / kSampledValues);
  PlaneCounts as_is, walked;
  for (size_t t = row_stride; t < rows && as_is.total() + cells_each <= 2 * kSampledValues; t += row_stride) {
    const float* const now = input.values + t * input.stride;
    for (size_t c = 0; c < input.cells; c += cell_stride) {
      as_is.Add(Rotated(now[c]));
      walked.Add(Distance((now - input.stride)[c], now[c]));
    }
  }
  if (as_is.total() == 0) return 0;
  const auto sum = [](const std::array<float, kPlanes>& bits) { return bits[0] + bits[1] + bits[2] + bits[3]; };
  const auto bits_as_is = as_is.Bits(), bits_walked = walked.Bits();
  const bool walks = sum(bits_walked) <= sum(bits_as_is);
  uint8_t flags = walks ? kWalked : 0;
  for (size_t p = 0; p < kPlanes && as_is.total() >= kSampledMin; ++p) {
    if ((walks ? bits_walked : bits_as_is)[p] > kRandomBits) flags |= static_cast<uint8_t>(1 << (kKeptShift + p));
  }
  return flags;
}

bool Kept(uint8_t flags, size_t plane) { return (flags >> (kKeptShift + plane) & 1) != 0; }

// Appends the planes that are not kept as one frame of a block each.
void AppendFrame(const uint8_t* planes, size_t n, uint8_t flags, int level, std::string* bytes) {
  thread_local std::unique_ptr<ZSTD_CCtx, FreeContext> context(ZSTD_createCCtx());
  size_t last = kPlanes, count = 0;
  for (size_t p = 0; p < kPlanes; ++p) {
    if (Kept(flags, p)) continue;
    last = p;
    ++count;
  }
  if (count == 0) return;
  ZSTD_CCtx_reset(context.get(), ZSTD_reset_session_only);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel, level);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_minMatch, kZstdMatchMin);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_hashLog, kZstdHashLog);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_contentSizeFlag, 0);
  ZSTD_CCtx_setPledgedSrcSize(context.get(), count * n);
  constexpr size_t kBlockBytes = 3;
  thread_local std::vector<char> frame;
  frame.resize(ZSTD_compressBound(count * n) + kPlanes * kBlockBytes);
  ZSTD_outBuffer out{frame.data(), frame.size(), 0};
  bool failed = false;
  for (size_t p = 0; p < kPlanes; ++p) {
    if (Kept(flags, p)) continue;
    ZSTD_inBuffer in{planes + p * n, n, 0};
    failed |= ZSTD_compressStream2(context.get(), &out, &in, p == last ? ZSTD_e_end : ZSTD_e_flush) != 0;
  }
  // With room for the worst case it fails on lack of memory only.
  if (!failed) bytes->append(frame.data(), out.pos);
}

}  // namespace

std::string EncodeChunk(const ChunkInput& input) {
  thread_local std::vector<uint8_t> planes;
  thread_local std::vector<uint32_t> words;
  const size_t n = input.steps.size() * input.cells;
  planes.resize(kPlanes * n);
  words.resize(n);
  const uint8_t flags = Choose(input);
  MakeWords(input, (flags & kWalked) != 0, words.data());
  uint8_t* const p0 = planes.data();
  uint8_t* const p1 = p0 + n;
  uint8_t* const p2 = p1 + n;
  uint8_t* const p3 = p2 + n;
  const uint32_t* const w = words.data();
  for (size_t i = 0; i < n; ++i) {
    p0[i] = static_cast<uint8_t>(w[i]);
    p1[i] = static_cast<uint8_t>(w[i] >> 8);
    p2[i] = static_cast<uint8_t>(w[i] >> 16);
    p3[i] = static_cast<uint8_t>(w[i] >> 24);
  }

  // What waits for a save is kept: a copy of it has no room to spare.
  thread_local std::string bytes;
  bytes.clear();
  ByteWriter out(&bytes);
  out.Put(kChunkVersion);
  PutSteps(input.steps, &out);
  out.PutVarint(input.cells);
  out.Put(flags);
  for (size_t p = 0; p < kPlanes; ++p) {
    if (Kept(flags, p)) bytes.append(reinterpret_cast<const char*>(planes.data() + p * n), n);
  }
  AppendFrame(planes.data(), n, flags, input.zstd_level, &bytes);
  return bytes;
}

absl::Status DecodeChunk(std::string_view bytes, Chunk* chunk) {
  ByteReader in(bytes);
  if (!GetShape(&in, &chunk->steps, &chunk->cells)) return DamagedChunk();
  const size_t n = chunk->steps.size() * chunk->cells;
  const auto flags = in.Get<uint8_t>();
  thread_local std::unique_ptr<ZSTD_DCtx, FreeContext> context(ZSTD_createDCtx());
  thread_local std::vector<uint8_t> unpacked;
  unpacked.resize(kPlanes * n);
  std::array<const uint8_t*, kPlanes> plane{};
  size_t packed = 0;
  for (size_t p = 0; p < kPlanes; ++p) {
    if (Kept(flags, p)) {
      plane[p] = reinterpret_cast<const uint8_t*>(in.GetRaw(n).data());
    } else {
      plane[p] = unpacked.data() + n * packed++;
    }
  }
  if (!in.ok() || (flags & kNoFlags) != 0) return DamagedChunk();
  const std::string_view frame = in.GetRaw(in.remaining());
  if (packed == 0 && !frame.empty()) return DamagedChunk();
  if (packed > 0) {
    const size_t size = ZSTD_decompressDCtx(context.get(), unpacked.data(), packed * n, frame.data(), frame.size());
    if (ZSTD_isError(size) || size != packed * n) return DamagedChunk();
  }
  thread_local std::vector<uint32_t> words;
  words.resize(n);
  const auto [p0, p1, p2, p3] = plane;
  for (size_t i = 0; i < n; ++i) {
    words[i] = uint32_t{p0[i]} | uint32_t{p1[i]} << 8 | uint32_t{p2[i]} << 16 | uint32_t{p3[i]} << 24;
  }
  const bool walked = (flags & kWalked) != 0;
  if (chunk->cells >= kFewCells) {
    UndoWords(walked, chunk->cells, words.data(), n);
  } else {
    for (size_t i = 0; i < n; i += chunk->steps.size()) UndoWords(walked, 1, words.data() + i, chunk->steps.size());
  }
  PutValues(words.data(), chunk);
  return absl::OkStatus();
}

absl::Status DecodeChunkShape(std::string_view bytes, std::vector<int64_t>* steps, size_t* cells) {
  ByteReader in(bytes);
  return GetShape(&in, steps, cells) ? absl::OkStatus() : DamagedChunk();
}

}  // namespace bellwether::server
