/* The recorder of a process: what its steps did and when, for timelines.
 *
 * Off, a note costs one atomic load. Recording, it is a point in time in a buffer of fixed size:
 * the begin or end of a task, of a step, of a send or of a receive. Who reads the points puts them
 * together. Times are those of CLOCK_MONOTONIC, which all processes of a host share.
 *
 *   start ─▶ (armed) ─ step `first` begins ─▶ (recording) ─ a step after `last` begins ─▶ (armed)
 *     ─▶ stop ─▶ take
 *
 * Every function may be called from any thread. There is no TensorFlow in here.
 */
#ifndef SMP_TF_OPS_CC_TRANSPORT_SMP_TIMELINE_H_
#define SMP_TF_OPS_CC_TRANSPORT_SMP_TIMELINE_H_

#include <stddef.h>
#include <stdint.h>

#include "transport/smp_transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a point is the begin or the end of. */
enum { SMP_EVENT_STEP = 0, SMP_EVENT_TASK = 1, SMP_EVENT_SEND = 2, SMP_EVENT_RECV = 3 };

#define SMP_TASK_BYTES 28

typedef struct smp_timeline_point {
  int64_t time_ns; /* 0 in a note: now */
  uint64_t program;
  int64_t step; /* -1: of the step that began last */
  uint64_t edge;
  uint64_t microbatch;
  uint64_t bytes;
  uint32_t peer;
  int32_t event;
  int32_t is_end;
  char task[SMP_TASK_BYTES]; /* of a task, its text with a final 0 */
} smp_timeline_point;

/* Nanoseconds of CLOCK_MONOTONIC. */
SMP_API int64_t smp_timeline_clock(void);

/* Begins to count steps and records those from number `first` to number `last`, both included and
 * counted from 0 at this call; `last` < 0: all from `first` on. At most `capacity` points are kept.
 * Returns 0 if it was started already. */
SMP_API int smp_timeline_start(size_t capacity, int64_t first, int64_t last);

/* Steps of this program count, until the next start; those of others are recorded, not counted. */
SMP_API void smp_timeline_count_program(uint64_t program);

/* Whether notes are taken now. */
SMP_API int smp_timeline_is_on(void);
SMP_API void smp_timeline_note(const smp_timeline_point* point);
SMP_API void smp_timeline_begin_step(uint64_t program, int64_t step);
SMP_API void smp_timeline_end_step(uint64_t program, int64_t step);

/* Ends the recording; returns how many points there are, and in `dropped` how many more came than
 * could be kept. */
SMP_API size_t smp_timeline_stop(uint64_t* dropped);

/* Copies up to `count` points and forgets all of them. Returns how many were copied. */
SMP_API size_t smp_timeline_take(smp_timeline_point* out, size_t count);

#ifdef __cplusplus
}
#endif

#endif /* SMP_TF_OPS_CC_TRANSPORT_SMP_TIMELINE_H_ */
