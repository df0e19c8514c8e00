// rank_merge.h: the ranks' frames of a step become one sample.
//
// A step closes in three cases: every expected rank has sent all its parts, all
// of them are already past it, or the caller closes it (its deadline passed).
// Steps close in order; a frame of a closed step is late.  Values combine by
// the merge rule of the catalogue: sums add, "equal" is compared and a
// disagreement reported.  A tensor whose parts fewer ranks tell than did before in the
// attempt is not measured in that step: a part is not shown as the whole.
//
// A rank that left is not expected, nor does it stand for one that is.  What it
// sent before is part of its steps, which go on waiting for the others.
//
// The server itself makes some values of a step (spectra).  They arrive later
// than the step's frames.  Hold() keeps the step open for them, and those
// behind it, until Fill() brings them or the caller gives up waiting.
//
// Deterministic and without a clock.  Not thread-safe: the run's shard owns it.

#ifndef BELLWETHER_SERVER_INGEST_RANK_MERGE_H_
#define BELLWETHER_SERVER_INGEST_RANK_MERGE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "server/model/step_sample.h"
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

  using Key = std::pair<uint32_t, int64_t>;  // attempt, step
  static constexpr Key kHelloOnly{0, -1};
  // The ranks that take part.  With the highest closed step it is what a
  // restart must know.
  struct Ranks {
    uint32_t attempt = 0;           // The newest for which a rank sent a Hello.
    std::map<uint32_t, Key> heard;  // rank -> its newest step; kHelloOnly before there is one.
    std::set<uint32_t> gone;
  };

  // open_steps_max: more open steps than that close the oldest.
  RankMerge(const Layout& layout, uint32_t reporters, size_t open_steps_max = 64);

  // The run has more ranks, tensors or modules from here on.
  void Grow(const Layout& layout);
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
  // A rank sent a Hello: it is expected, also if it had left.  The ranks of an
  // earlier attempt are then not expected, and an older attempt changes
  // nothing.
  void Join(uint32_t rank, uint32_t attempt, uint32_t reporters);
  // A rank that left is not waited for; one that sends is expected again.  That of a rank
  // which takes no part is nothing: of an attempt before, whose ranks left with it.
  void SetGone(uint32_t rank, const Sink& sink);

  // Of the oldest open step's first frame; 0 = no step is open.
  Lsn oldest_open_lsn() const;
  // The oldest open step; false if none.
  bool OldestOpen(uint32_t* attempt, int64_t* step) const;
  uint32_t reporting() const;  // Ranks that have sent, and not left.
  const std::set<uint32_t>& gone() const { return ranks_.gone; }
  const Ranks& ranks() const { return ranks_; }

  // Highest closed step; -1 = none.
  uint32_t closed_attempt() const { return closed_attempt_; }
  int64_t closed_step() const { return closed_step_; }
  // After a restart: everything up to here is closed.
  void Restore(uint32_t closed_attempt, int64_t closed_step, Ranks ranks);
  // While set, what comes was there when the restored state was saved: it returns to its
  // open step, no rank comes back by it, and no step closes, since none had then.
  void SetReplay(bool replay) { replay_ = replay; }

 private:
  // By how many ranks a cell was reported, and by which first.
  struct Reports {
    uint32_t count = 0, first_rank = 0;
  };
  struct Open {
    StepSample sample;
    Lsn first_lsn = 0;
    std::map<uint32_t, std::set<uint32_t>> parts;               // rank -> parts that came
    std::set<uint32_t> whole;                                   // ranks with all parts
    std::map<SignalId, std::vector<Reports>> reports;           // By cell, of what is counted.
    std::map<std::pair<SignalId, size_t>, size_t> disagreeing;  // cell -> of sample.disagreements
    int holds = 0;
  };

  Open* OpenStep(const Key& key, Lsn lsn);
  void Combine(uint32_t rank, const RankFrame& frame, Open* open);
  // Sums of tensors of which a part has not come.
  void LeaveOutParts(Open* open);
  // Of a value by `rank` that is another than the cell's.
  static void RecordDisagreement(const StepSample::Disagreement& found, uint32_t rank, size_t cell, Open* open);
  size_t expected() const;
  size_t Present(const Open& open) const;  // Ranks with all parts that have not left.
  bool IsComplete(const Key& key, const Open& open) const;
  void Close(std::map<Key, Open>::iterator step, bool complete, const Sink& sink);
  void CloseReady(const Sink& sink);

  Layout layout_;
  uint32_t reporters_;
  const size_t open_steps_max_;
  std::map<Key, Open> open_;
  Ranks ranks_;
  // How many ranks have told of a tensor in one step, at most, by signal and row; of the newest attempt.  Not saved: a
  // restart learns it anew.
  std::map<SignalId, std::vector<uint16_t>> tellers_;
  bool replay_ = false;
  uint32_t closed_attempt_ = 0;
  int64_t closed_step_ = -1;
  StepSample spare_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_RANK_MERGE_H_
