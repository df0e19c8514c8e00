// step_sample.h: what was measured in one step, first per rank, then merged.
//
// A rank's frame holds rectangles of heads, or ranges of other rows; the merged sample
// holds one dense matrix per signal.  What is no head lies in a matrix of one column, or
// of experts.  A cell that no rank reported holds kNotMeasured, a quiet NaN with a
// payload of its own: a NaN that was measured stays distinguishable and is stored and
// judged as data.

#ifndef BELLWETHER_SERVER_MODEL_STEP_SAMPLE_H_
#define BELLWETHER_SERVER_MODEL_STEP_SAMPLE_H_

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "bellwether/signal_table.h"
#include "server/model/own_signals.h"
#include "server/model/run_types.h"

namespace bellwether::server {

inline constexpr uint32_t kNotMeasuredBits = 0x7fc0be11u;
inline float NotMeasured() { return std::bit_cast<float>(kNotMeasuredBits); }
inline bool IsNotMeasured(float value) { return std::bit_cast<uint32_t>(value) == kNotMeasuredBits; }

// Rows and columns of a signal's matrix under a layout: layers and heads, or rows of
// another kind and 1, or layers and experts.
struct MatrixShape {
  int32_t layers = 0;
  int32_t heads = 0;
  int64_t size() const { return int64_t{layers} * heads; }
};
MatrixShape ShapeOf(const SignalInfo& signal, const Layout& layout);

// One signal of a rectangle of heads, or of a range of rows, which stand for the layers.
// Values lie in RankFrame::values.
struct RankBlock {
  SignalId signal = SignalId::kNone;
  int32_t layer_begin = 0, layer_count = 0;
  int32_t head_begin = 0, head_count = 0;
  size_t offset = 0;  // Of the first value, row-major [layer][head].
};

// Values of an own signal, as OwnValues of ingest.proto says.
struct OwnBlock {
  OwnSignal signal;
  int32_t layer = 0, head = 0;  // Of the first value.
  size_t count = 0;
  size_t offset = 0;  // As RankBlock's.
};

// One rank's step, whole or a part of it.  Already validated.
struct RankFrame {
  uint32_t attempt = 0;
  int64_t step = 0;
  uint32_t part = 0, parts = 1;
  int64_t time_unix_ns = 0;
  bool partial_rows = false;
  uint64_t dropped_total = 0;   // Ring and window, as the client reported.
  uint64_t stripped_total = 0;  // Sent without their heads, this one included.
  std::vector<RankBlock> blocks;
  std::vector<float> values;
  std::vector<OwnBlock> own;  // They become blocks in ingest/own_values.h.
  // Left out: of signals that this server does not know yet.  Numbers of those, as they came.
  std::vector<int32_t> unknown_signals;
  uint64_t unknown_values = 0;
};

// All ranks' step.  matrix(s) is empty if no rank reported s.
class StepSample {
 public:
  uint32_t attempt = 0;
  int64_t step = 0;
  int64_t time_unix_ns = 0;  // The latest rank's clock.
  uint32_t ranks = 0;        // That reported.
  bool complete = true;      // False: closed by the deadline.
  // Signals with merge "equal" on which ranks disagreed, with the head, and the lowest and
  // highest of their values: once a cell, and of no more cells than that.
  static constexpr size_t kDisagreementsMax = 4096;
  struct Disagreement {
    static constexpr size_t kRanksMax = 8;
    SignalId signal;
    int32_t layer, head;
    float low, high;
    uint32_t first_rank = 0;           // Whose frame came first, of tensors and modules.
    std::vector<uint32_t> ranks = {};  // With other values, in the order of their frames: the first of
    uint32_t ranks_total = 0;          // so many.
    uint32_t reporters = 0;            // Ranks that reported the cell, of tensors and modules.
  };
  std::vector<Disagreement> disagreements;
  uint64_t disagreements_left_out = 0;  // Values that differed in further cells.

  // Starts afresh for `layout`; keeps its memory.
  void Reset(const Layout& layout);
  // The run has more ranks, tensors or modules than at Reset(): their cells are not measured.
  void Grow(const Layout& layout);
  const Layout& layout() const { return layout_; }

  bool has(SignalId signal) const { return offset_[index(signal)] >= 0; }
  // [layers][heads or kv_heads], or 1 value for run signals; empty if absent.
  std::span<const float> matrix(SignalId signal) const;
  // Adds the matrix, filled with kNotMeasured, if it is absent.
  std::span<float> Add(SignalId signal);
  // The run-level value, kNotMeasured if absent.
  float scalar(SignalId signal) const;
  // Present signals by rising id.
  const std::vector<SignalId>& signals() const { return signals_; }

 private:
  static size_t index(SignalId signal) { return static_cast<size_t>(signal); }

  Layout layout_;
  std::vector<SignalId> signals_;
  std::array<int64_t, kSignalIdEnd> offset_{};
  std::vector<float> values_;
};

// One cell of a derived signal, as DeriveMatrix() below defines it.
float DeriveValue(const SignalInfo& signal, float numerator, float denominator);

// Fills `out` with the derived matrix: numerator / denominator elementwise; a
// cell is kNotMeasured if either part is, or if the denominator is 0.  Mixed
// granularities (a query-head numerator over a key-head denominator) repeat the
// key head for its group.  Returns false, leaving `out` empty, if a part is
// absent from the sample or `derived` is a measured signal that is absent; a
// measured signal is copied.
bool DeriveMatrix(const StepSample& sample, const SignalInfo& signal, std::vector<float>* out);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_STEP_SAMPLE_H_
