// batch_series.h: one signal of all heads, thinned to batch means with a
// window.
//
// Struct of arrays: a row holds one batch of all heads, so that adding a sample
// and closing a batch run over contiguous memory.  The memory is fixed by the
// number of heads: (3 + window) floats a head.
//
// A cell that was not measured, or whose value is not finite, adds nothing to
// its mean.  A batch without a value leaves the cell's newest value as it was
// and a NaN in the window.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_BATCH_SERIES_H_
#define BELLWETHER_SERVER_DETECT_BATCH_SERIES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bellwether/kernels/detector_bank.h"

namespace bellwether::server {

class BatchSeries {
 public:
  // window 0 keeps the newest mean only.
  BatchSeries(size_t heads, int32_t window) : heads_(heads), window_(window) {}

  bool present() const { return !newest_.empty(); }
  // `values`: one per head.  Memory is taken at the first call.
  void Add(std::span<const float> values);
  // Ends the batch: its means become the newest values and, if anything was
  // measured, a row of the window.  False if nothing was measured.
  bool Close(int64_t step);
  // The same in two halves, for callers that have the medians from a detector
  // bank.  median() and what is relative to it are as before until Settle().
  bool CloseRow(int64_t step);
  // What a bank reads; valid until the next call that changes anything.
  kernels::BankTrack Track() const;
  void Settle(const kernels::BankTrack& track);
  // Forgets the window and what is being summed; the newest values stay.
  void ForgetWindow();
  // Makes the window longer or shorter; the newest rows that fit stay.
  void SetWindow(int32_t window);

  // NaN before the first value.
  float newest(size_t head) const { return newest_[head]; }
  std::span<const float> newest() const { return newest_; }
  // kernels::LowerMedian of the newest values.
  float median() const { return median_; }
  // Rows in the window.  Below, `newest` takes only the newest so many of them,
  // 1..rows(); `relative` divides each value by the median of its row.
  int32_t rows() const { return rows_; }
  // Of one head, oldest first.
  void Window(size_t head, int32_t newest, bool relative, std::vector<float>* values, std::vector<float>* steps) const;
  // From the oldest row to the newest.
  int64_t span_steps(int32_t newest) const;
  // The mean of the three newest finite values against that of the three
  // oldest; 1 if there are fewer than 6.
  float Rise(size_t head, int32_t newest, bool relative) const;
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    a(rows_);
    a(next_);
    a(median_);
    a(sum_);
    a(count_);
    a(newest_);
    a(ring_);
    a(ring_median_);
    a(ring_step_);
  }
  // After Visit with a reader: whether the sizes are those of this object.
  bool Consistent() const;

 private:
  size_t row(int32_t age) const {  // 0 = oldest
    return static_cast<size_t>((next_ + window_ - rows_ + age) % window_);
  }
  size_t heads_;
  int32_t window_;
  int32_t rows_ = 0;
  int32_t next_ = 0;
  // Of the batch that CloseRow() ended and Settle() has not seen.
  bool fresh_ = false;
  bool holes_ = false;
  int32_t slot_ = -1;
  int64_t rows_written_ = 0;
  float median_ = 0;
  std::vector<float> sum_, count_, newest_;
  std::vector<float> ring_;         // [window][heads]
  std::vector<float> ring_median_;  // [window]
  std::vector<float> ring_step_;    // [window]
  std::vector<float> scratch_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_BATCH_SERIES_H_
