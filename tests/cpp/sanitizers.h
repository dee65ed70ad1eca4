// What tests must know of the build that they are in.
#pragma once

namespace torch_ckpt {

// Code that is instrumented takes times that say nothing of what is shipped:
// no test compares them. Of states and orders that are tried by the hundred
// sanitizers try one in so many: the plain build sees what comes out of all.
// They look at the way there, which is much the same.
#ifdef TORCH_CKPT_SANITIZED
inline constexpr bool kSanitized = true;
inline constexpr int kOneInSanitized = 12;
#else
inline constexpr bool kSanitized = false;
inline constexpr int kOneInSanitized = 1;
#endif

}  // namespace torch_ckpt
