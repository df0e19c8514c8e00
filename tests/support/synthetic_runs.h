// synthetic_runs.h: runs that look like runs, without a trainer or a store.
//
// Every value is a function of (run, step, layer, head), so that a picture, a
// page of metrics or a query can be checked against it.  In a failing run one
// head drifts: its drift ratio doubles every 350 steps, ties, the norm of W_Q
// and the logits follow, the loss last (SIGNALS: "why the drift ratio leads").

#ifndef BELLWETHER_TESTS_SUPPORT_SYNTHETIC_RUNS_H_
#define BELLWETHER_TESTS_SUPPORT_SYNTHETIC_RUNS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/model/alert_transition.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"

namespace bellwether::server {

struct SyntheticRun {
  RunId id = 1;
  std::string name = "run";
  Layout layout{.layers = 12, .heads = 12, .kv_heads = 12, .head_dim = 64, .seq_len = 1024};
  int64_t steps = 4000;
  int64_t every = 20;  // Sampling period of the heads.
  Head failing;        // -1: a healthy run.
  int64_t fails_at = 1500;
  int32_t stage = 0;
  bool ended = false;
};

// The sample of one step, heads included.
StepSample MakeSample(const SyntheticRun& run, int64_t step);

// The snapshot at the run's last step; reported at `now_unix_ns`.
RunSnapshotPtr MakeSnapshot(const SyntheticRun& run, int64_t now_unix_ns);

// A firing alert of the failing head.
AlertTransition MakeAlert(const SyntheticRun& run, Severity severity, const std::string& rule, int64_t now_unix_ns);

// Serves the runs' series by computing them.  Read-only; thread-safe.
class SyntheticSeries final : public SeriesStore {
 public:
  // Adds the run, or lets it grow.
  void Add(const SyntheticRun& run) {
    absl::MutexLock lock(&mutex_);
    runs_[run.id] = run;
  }

  void Open(RunId, const Layout&) override {}
  absl::Status Append(RunId, const StepSample&) override { return absl::UnimplementedError("read-only"); }
  absl::Status Save(RunId, RunBatch*, std::string*) override { return absl::UnimplementedError("read-only"); }
  absl::Status Restore(RunId, const Layout&, std::string_view) override {
    return absl::UnimplementedError("read-only");
  }
  absl::Status Close(RunId, RunBatch*) override { return absl::UnimplementedError("read-only"); }
  absl::StatusOr<SeriesPoints> ReadSeries(RunId run, const Layout& layout, const SeriesKey& key, int64_t begin,
                                          int64_t end, size_t points_max, int32_t attempt) const override;
  absl::StatusOr<std::vector<float>> ReadMatrix(RunId run, const Layout& layout, SignalId signal, int64_t step,
                                                int64_t* at) const override;
  absl::Status ReadAll(RunId, const Layout&, const std::function<absl::Status(const StepSample&)>&) const override {
    return absl::UnimplementedError("not for synthetic runs");
  }
  int64_t memory_bytes() const override { return 0; }
  void Drain() override {}

 private:
  absl::StatusOr<SyntheticRun> Find(RunId id) const;

  mutable absl::Mutex mutex_;
  std::map<RunId, SyntheticRun> runs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_SYNTHETIC_RUNS_H_
