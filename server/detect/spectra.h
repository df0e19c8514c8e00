// spectra.h: from Gram matrices to the gram_* signals.
//
// Matrices of one size go to the bank together.  Thread-safe as the bank is.

#ifndef BELLWETHER_SERVER_DETECT_SPECTRA_H_
#define BELLWETHER_SERVER_DETECT_SPECTRA_H_

#include <span>
#include <vector>

#include "server/detect/gram_assembler.h"
#include "server/detect/spectra_bank.h"
#include "server/model/gram_types.h"

namespace bellwether::server {

// An answer without values; says which task it is of.
GramAnswer AnswerTo(const GramTask& task, GramAnswer::Outcome outcome);

// One answer per task, in their order.
std::vector<GramAnswer> SolveGrams(std::span<const GramTask> tasks, SpectraBank* bank);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SPECTRA_H_
