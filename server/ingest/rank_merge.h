// rank_merge.h: the ranks' frames of a step become one sample.
//
// A step closes when every rank that is expected has sent all its parts, when
// all of them are already past it, or when the caller says so (its deadline
// passed).  Steps close in order; a frame of a closed step is late.  Values
// combine by the merge rule of the catalogue: sums add, "equal" is compared and
// a disagreement reported.
//
// Values that the server itself makes of what came for a step (spectra) arrive
// later than the step's frames: Hold() keeps the step open for them, and those
// behind it, until Fill() brings them or somebody gives up waiting.
//
// Deterministic and without a clock.  Not thread-safe: the run's shard owns it.

#ifndef BELLWETHER_SERVER_INGEST_RANK_MERGE_H_
#define BELLWETHER_SERVER_INGEST_RANK_MERGE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "server/store/step_sample.h"
#include "server/store/wal.h"

namespace bellwether::server {

class RankMerge {
 public:
  // Gets each closed step, in order; valid during the call.
  using Sink = std::function<void(const StepSample&)>;
  enum class Outcome {
    kTaken,
    kLate,      // Its step was closed before; nothing was done.
    kRepeated,  // This rank's part was there already; nothing was done.
  };
  // A value for a cell that no rank has measured.
  struct Cell {
    SignalId signal = SignalId::kNone;
    int32_t layer = 0, head = 0;
    float value = 0;
  };

  // open_steps_max: more open steps than that close the oldest.
  RankMerge(const Layout& layout, uint32_t reporters, size_t open_steps_max = 64);

  // `lsn` is remembered while the frame's step is open.
  Outcome Add(uint32_t rank, const RankFrame& frame, Lsn lsn, const Sink& sink);
  // Something other than a frame came for a step, with `lsn`, and `holds` more
  // calls of Fill() are to come for it.  False: the step was closed before;
  // nothing was done.
  bool Hold(uint32_t attempt, int64_t step, Lsn lsn, int holds);
  // Fills in cells that are not measured and ends one hold.  False: as Hold().
  bool Fill(uint32_t attempt, int64_t step, const std::vector<Cell>& cells, const Sink& sink);
  // A step that this rank took part in waits for Fill(), or is behind one.
  bool Holding(uint32_t rank) const;

  // Closes every open step up to and with this one, with what there is.
  void CloseThrough(uint32_t attempt, int64_t step, const Sink& sink);
  // A rank that left is not waited for; one that sends is expected again.
  void SetGone(uint32_t rank, const Sink& sink);
  void SetReporters(uint32_t reporters) { reporters_ = reporters; }

  // Of the oldest open step's first frame; 0 = no step is open.
  Lsn oldest_open_lsn() const;
  // The oldest open step; false if none.
  bool OldestOpen(uint32_t* attempt, int64_t* step) const;
  uint32_t reporting() const { return static_cast<uint32_t>(seen_.size()); }

  // Highest closed step; -1 = none.
  uint32_t closed_attempt() const { return closed_attempt_; }
  int64_t closed_step() const { return closed_step_; }
  // After a restart: everything up to here is closed.
  void RestoreClosed(uint32_t attempt, int64_t step);

 private:
  using Key = std::pair<uint32_t, int64_t>;  // attempt, step
  struct Open {
    StepSample sample;
    Lsn first_lsn = 0;
    std::map<uint32_t, std::set<uint32_t>> parts;  // rank -> parts that came
    std::set<uint32_t> whole;                      // ranks with all parts
    std::map<SignalId, uint32_t> mean_count;
    int holds = 0;
  };

  Open* OpenStep(const Key& key, Lsn lsn);
  void Combine(const RankFrame& frame, Open* open);
  size_t expected() const;
  bool IsComplete(const Key& key, const Open& open) const;
  void Close(std::map<Key, Open>::iterator step, bool complete, const Sink& sink);
  void CloseReady(const Sink& sink);

  const Layout layout_;
  uint32_t reporters_;
  const size_t open_steps_max_;
  std::map<Key, Open> open_;
  std::map<uint32_t, Key> seen_;  // rank -> its newest (attempt, step)
  std::set<uint32_t> gone_;
  uint32_t closed_attempt_ = 0;
  int64_t closed_step_ = -1;
  StepSample spare_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_RANK_MERGE_H_
