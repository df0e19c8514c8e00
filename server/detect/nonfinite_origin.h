// nonfinite_origin.h: where in a step the first value that is not finite arose.
//
// A NaN travels.  In the forward pass it goes to all layers above, at the loss
// into all gradients, in the backward pass to all layers below, with the step
// into the weights.  Most of what is not finite in a sample therefore is a
// consequence.  The origin follows from the order:
//
//   forward   the lowest layer that is not finite
//   backward  the highest one, unless the forward pass had reached the loss
//   weights   measured after the optimizer's step
//
// The queries' gradient is seen in no other signal.  So W_Q of a layer above
// the highest one whose gradients are not finite is the origin of these.  If
// all layers' weights are not finite they show nothing: clipping by a norm that
// is NaN does that.
//
// If the forward pass is lost from the lowest layer on, in all of its heads, a
// step before may have spoiled all weights.  No layer is named unless these are
// known to have been finite.
//
// Where the elements of dO, dQ, dK and dV that are not finite are counted, more
// is known.  A layer whose dO is finite and whose dQ, dK or dV is not has a
// kernel that is at fault, whatever the layers above it are; the layers below
// are innocent.  Sums of a layer that are infinite, while no element is, have
// overflowed: no kernel is at fault.  One whose dO is not finite got it from between it and the layer
// above.  Sums of the laws of such a layer say nothing more.
//
// A layer that does not follow from another one is an origin of its own.  A
// loss that is not finite while all scores are arose behind them.
//
// Gram matrices and residuals are made of squares, which overflow where sigma(W)
// does not.  Where it is finite they are information: the weights are finite, and
// the measurement cannot be used.
//
// Where ranks tell the norms of their own gradients, the first finding says which
// ranks' are not finite while others' are.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_NONFINITE_ORIGIN_H_
#define BELLWETHER_SERVER_DETECT_NONFINITE_ORIGIN_H_

#include <vector>

#include "server/detect/finding.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

struct Nonfinite {
  // Of the origins' heads in their order, then of the run; not their
  // severity, but for measurements that overflow: kInfo.  Empty: all is finite.
  std::vector<Finding> findings;
  bool forward = false, backward = false, weights = false;  // Anything of a head.
  bool loss = false, grad_norm = false;
  // The first origin is what a kernel returned from a finite dO, after a forward pass that is finite.
  bool kernel = false;
};

// `weights_were_finite`: known of the weights with which the step began.
Nonfinite FindNonfinite(const StepSample& sample, bool weights_were_finite);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_NONFINITE_ORIGIN_H_
