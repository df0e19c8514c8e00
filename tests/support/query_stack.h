// query_stack.h: everything that a Query service reads, filled with synthetic
// runs, on the real store in a temporary folder.
//
// A run has every head's common_mode_sum, spread_sum and rows plus loss.  So a
// test can compute drift_ratio(step, layer, head) = DriftRatio(...) for itself:
// 1 for all heads but one, which grows from a step on.

#ifndef BELLWETHER_TESTS_SUPPORT_QUERY_STACK_H_
#define BELLWETHER_TESTS_SUPPORT_QUERY_STACK_H_

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "server/engine/ports/run_control.h"
#include "server/query/query_engine.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"

namespace bellwether::server {

class QueryStack {
 public:
  struct RunSpec {
    std::string name = "run";
    Layout layout{.layers = 3, .heads = 4, .kv_heads = 2, .head_dim = 16, .seq_len = 64};
    int64_t steps = 400;
    int64_t every = 1;  // Sampling period of the heads.
    Head failing{.layer = 1, .head = 2};
    int64_t fails_at = 200;  // The failing head doubles each 50 steps from here.
    Head nan{};              // Its common mode is NaN in every step.
    int32_t stage = 0;
    // Own signals: kl, a mean that is the step, in each so many steps; and in every step z, a maximum of two layers (10
    // and 11), and seen, a sum.  0: none.
    int64_t own_every = 0;
    bool ends =
        false;  // Experts of layer 1 have loads of 1, 2 and so on, and the last head a bias that is far below 0.
    bool ended = false;
    int64_t last_report_unix_ns = 1'700'000'000'000'000'000;
  };

  QueryStack();
  ~QueryStack();
  QueryStack(const QueryStack&) = delete;
  QueryStack& operator=(const QueryStack&) = delete;

  RunId AddRun(const RunSpec& spec);
  // Publishes the run's snapshot as changed by `edit`.
  void Edit(RunId run, const std::function<void(RunSnapshot*)>& edit);
  static double DriftRatio(const RunSpec& spec, int64_t step, Head head);

  // A transition of `run`; `bytes` of summary.
  AlertTransition MakeTransition(RunId run, const std::string& key, uint32_t k, AlertState state, Severity severity,
                                 size_t bytes = 40) const;
  AlertTransition Post(AlertTransition transition);  // With its id.

  QueryStores stores();
  RunTable& runs() { return runs_; }
  AlertStore& alerts() { return *alerts_; }
  ActionStore& actions() { return *actions_; }
  Counters& counters() { return counters_; }
  Baselines& baselines() { return *baselines_; }
  double refused(const std::string& limit);
  // What the control was told to import, byte for byte, and what it exports.
  std::string imported() const;
  void set_exported(std::string bytes);
  // While set, Export() writes until its sink stops it.
  void set_export_endless(bool endless);
  int exports_started() const;
  int exports_running() const;
  // Called by every note before it is taken; may wait.
  void set_before_note(std::function<void()> hook);

 private:
  class Control;

  std::filesystem::path folder_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<SeriesStore> series_;
  std::unique_ptr<AlertStore> alerts_;
  std::unique_ptr<ActionStore> actions_;
  RunTable runs_;
  Counters counters_;
  std::unique_ptr<Baselines> baselines_;
  std::unique_ptr<Control> control_;
  RunId next_run_ = 1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_QUERY_STACK_H_
