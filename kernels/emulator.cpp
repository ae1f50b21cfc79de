// The emulator of chapter 10: runs one block of a kernel at a time, every thread of it on a stack of its own, all on one thread of the processor.
#include <dlfcn.h>
#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <map>
#include <mutex>
#include <vector>
#define EMULATOR
#include "emulated.cuh"
typedef emu::u8 u8;
typedef emu::u16 u16;
typedef emu::u32 u32;
typedef emu::u64 u64;

// ---------------------------------------------------------------- switching stacks
// Keep what a called function must keep, change the stack pointer, and return: to whoever switched away on that stack
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
extern "C" void emu_switch(void** from, void* to);
static void* new_stack(char* top, void (*f)()) {
  void** p = (void**)((size_t)top & ~(size_t)15);
  *--p = 0;                                     // where f would return to; and the stack is as after a call
  *--p = (void*)f;
  for (int i = 0; i < 6; i++) *--p = 0;
  return p;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
extern "C" void emu_switch(void** from, void* to);
static void* new_stack(char* top, void (*f)()) {
  u64* p = (u64*)((size_t)top & ~(size_t)15) - 20;
  memset(p, 0, 160);
  p[11] = (u64)f;
  return p;
}
#else
static void emu_switch(void** from, void* to) { ucontext_t here; *from = &here; swapcontext(&here, (ucontext_t*)to); }
static void* new_stack(char* top, void (*f)()) {
  constexpr size_t room = 48 << 10;
  ucontext_t* c = (ucontext_t*)(((size_t)top - sizeof(ucontext_t)) & ~(size_t)63);
  getcontext(c);
  c->uc_stack.ss_sp = (char*)c - room; c->uc_stack.ss_size = room; c->uc_link = 0;
  makecontext(c, f, 0);
  return c;
}
#endif

// ---------------------------------------------------------------- who is there
struct Warp;
struct Copy { u32 to; const void* from; u32 n, bytes; int group; };
struct Thread {
  void* stack; Warp* warp; uint3 index; int lane;
  bool early; const char* state; int op, line; void* place;     // where it waits, or how it ended
  int group; std::vector<Copy> copies;
};
struct Warp { Thread* lane[32]; u32 exist, ready, arrived, yielded, ended; int round; bool news; u64 met, value[2][32]; };      // met: when, the last time; news: a lane knows what others do not
// What is known of a warp: that all before `met` is done, and what `lanes` did until `last`, which is before the next meeting
struct Seen { u64 met, last; u32 lanes; };
struct Clock { Seen of[32]; };
struct Bulk { u32 barrier; Copy copy; Clock done; };
struct Report { char text[2048]; u64 address, place; int block[3], thread[3], triggered; };

SHOWN uint3 threadIdx, blockIdx;
SHOWN dim3 blockDim, gridDim;
namespace emu { SHOWN const char *arena, *arena_end; SHOWN bool early; SHOWN float half_table[1 << 16]; }

constexpr size_t STACK = 128 << 10, BELOW = 16 << 20, SHARED_ROOM = 256 << 10, GUARD = 256 << 10, ARENA = (size_t)1 << 37;
static char* stacks; static size_t page;
static Thread threads[1024], home, *current = &home;
static Warp warps[32];
static std::vector<Bulk> bulks;
static int total, progress, alive;
static u64 now = 1, block_met = 1;                              // now: grows with each meeting of a warp or block and each arrival at a barrier in shared memory
static struct { int waiting, line, sum[2], round; void* place; std::vector<Thread*> threads; } barrier;
static char *room, *dynamic, *static_begin, *static_end, *static_zero; static u32 dynamic_bytes, dynamic_name;      // static_zero: what has the name 1024
static void (*entry)(void**); static void** params;
static bool pdl, triggered; static const u64* dirty; static int dirty_n;
struct Span { u64 begin, end, low, high; char* written; };      // an array among the arguments, and what of it has been written: bytes of [low, high), 1 in `written` each
static Span *spans, *span; static int spans_n;                  // span: of the last write
static sigjmp_buf back; static volatile bool running; static pthread_t runner; static Report* report;

[[noreturn]] static void fail(u64 address, u64 place, const char* text, ...) {
  va_list more; va_start(more, text); vsnprintf(report->text, sizeof report->text, text, more); va_end(more);
  report->address = address;
  Dl_info info;
  report->place = place && dladdr((void*)place, &info) && info.dli_fbase ? place - (u64)info.dli_fbase : 0;
  report->block[0] = blockIdx.x; report->block[1] = blockIdx.y; report->block[2] = blockIdx.z;
  report->thread[0] = current->index.x; report->thread[1] = current->index.y; report->thread[2] = current->index.z;
  siglongjmp(back, 1);
}
#define PLACE ((u64)__builtin_return_address(0) - 1)

// ---------------------------------------------------------------- whose turn it is
static inline void switch_to(Thread* to) {
  Thread* from = current;
  current = to; threadIdx = to->index; emu::early = to->early;
  emu_switch(&from->stack, to->stack);
}
// This lane has to wait: the next lane of the warp that can go on, or home if there is none
static inline void next_lane() {
  Warp& w = *current->warp; u32 r = w.ready; int i = current->lane;
  if (!r) { switch_to(&home); return; }
  u32 later = i == 31 ? 0 : r & ~0u << (i + 1);
  switch_to(w.lane[__builtin_ctz(later ? later : r)]);
}
static void wait_as(const char* state, int line, void* place) {
  Thread* t = current; t->state = state; t->line = line; t->place = place;
  t->warp->ready &= ~(1u << t->lane);
  next_lane();
  t->state = 0;
}
enum Access { READ, WRITE, ATOMIC };
static void touched(u32 shared, u32 n, Access how);
static void finish_copies(Thread* t, int keep) {
  size_t left = 0;
  for (size_t i = 0; i < t->copies.size(); i++) {
    Copy& c = t->copies[i];
    if (c.group >= t->group - keep) { t->copies[left++] = c; continue; }
    char* to = (char*)emu::shared_pointer(c.to, 1);
    memcpy(to, c.from, c.bytes); memset(to + c.bytes, 0, c.n - c.bytes);
    touched(c.to, c.n, WRITE);
  }
  t->copies.resize(left);
}
static void run_thread() {
  entry(params);
  Thread* t = current;
  if (t->early) fail(0, 0, "ends without pdl_wait, though it was launched while the kernel before may run");
  t->state = "has ended"; t->warp->ready &= ~(1u << t->lane); t->warp->ended |= 1u << t->lane; alive--; progress++;
  t->copies.clear();
  next_lane();
  abort();
}

// ---------------------------------------------------------------- meetings
static const char* OPS[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync", "__match_any_sync", "__reduce_sync", "mma", "ldmatrix", "group"};
static void mma_all(Warp& w, u64* v);
static void ldmatrix_all(Warp& w, u64* v);
[[gnu::noinline]] static void tell_all(Warp& w);
// "lanes 0-3: __shfl_xor_sync {place}; lanes 4-31: has ended"; a place in braces becomes a line later
static void describe(char* out, size_t size, Warp& w) {
  size_t n = 0; u32 left = w.exist;
  auto what = [&](int i) { return w.arrived >> i & 1 ? OPS[w.lane[i]->op] : w.lane[i]->state ? w.lane[i]->state : "runs"; };
  auto place = [&](int i) { return w.ended >> i & 1 ? 0 : w.lane[i]->place; };
  while (left && n + 200 < size) {
    int i = __builtin_ctz(left); u32 same = 0;
    for (int j = i; j < 32; j++) if (left >> j & 1 && what(j) == what(i) && place(j) == place(i)) same |= 1u << j;
    left &= ~same;
    n += snprintf(out + n, size - n, "%slanes", n ? "; " : "");
    for (int j = 0, first = 1; j < 32 && n + 200 < size; j++) if (same >> j & 1) {
      int k = j; while (k < 31 && same >> (k + 1) & 1) k++;
      n += snprintf(out + n, size - n, k > j ? "%s %d-%d" : "%s %d", first ? "" : ",", j, k); first = 0; j = k;
    }
    Dl_info info; u64 at = (u64)place(i), base = at && dladdr((void*)at, &info) ? (u64)info.dli_fbase : 0;
    n += snprintf(out + n, size - n, at ? ": %s {%llx}" : ": %s", what(i), at - base);
  }
}
namespace emu {
const u64* meet(Op op, u64 value, int line) {
  Thread* t = current; Warp& w = *t->warp; int round = w.round & 1;
  w.value[round][t->lane] = value;
  t->op = op; t->line = line; t->place = (void*)PLACE; w.arrived |= 1u << t->lane;
  if (w.arrived != w.exist) { w.ready &= ~(1u << t->lane); next_lane(); return w.value[round]; }
  for (int i = 0; i < 32; i++) if (w.exist >> i & 1 && (w.lane[i]->op != op || w.lane[i]->line != line)) {
    char lanes[1500]; describe(lanes, sizeof lanes, w); fail(0, (u64)t->place, "lanes of one warp meet in different instructions: %s", lanes);
  }
  if (op == MMA) mma_all(w, w.value[round]);
  if (op == LDMATRIX) ldmatrix_all(w, w.value[round]);
  w.arrived = 0; w.round++; w.ready = w.exist; progress++; w.met = ++now;
  if (__builtin_expect(w.news, 0)) tell_all(w);
  return w.value[round];
}
int block_barrier(int add, int line) {
  void* place = (void*)PLACE; int round = barrier.round & 1;
  if (!barrier.waiting) { barrier.line = line; barrier.place = place; barrier.sum[round] = 0; }
  if (barrier.line != line) {
    Thread* o = barrier.threads[0];
    fail(0, (u64)place, "waits at another __syncthreads than thread (%d, %d, %d)", o->index.x, o->index.y, o->index.z);
  }
  barrier.sum[round] += add;
  if (++barrier.waiting < total) { barrier.threads.push_back(current); wait_as("waits at __syncthreads", line, place); return barrier.sum[round]; }
  for (Thread* t : barrier.threads) t->warp->ready |= 1u << t->lane;
  barrier.threads.clear(); barrier.waiting = 0; barrier.round++; progress++; block_met = ++now;
  for (int i = 0; i < (total + 31) / 32; i++) warps[i].met = now;
  return barrier.sum[round];
}

// ---------------------------------------------------------------- memory
void check_global(const void* p, u32 size) {
  u64 place = PLACE;
  if ((const char*)p < arena || (const char*)p + size > arena_end) fail((u64)p, place, "@");
  if ((u64)p & (size - 1)) fail((u64)p, place, "misaligned: %d bytes at once", size);
}
static void* shared_at(u32 a, u32 size, u64 place) {
  char* p = a >= dynamic_name ? dynamic + (a - dynamic_name) : static_zero + (int)(a - 1024);
  bool there = a >= dynamic_name ? (u64)a + size <= (u64)dynamic_name + dynamic_bytes : p >= static_begin && p + size <= static_end;
  if (!there) fail(0, place, "%d bytes of shared memory at %d, but the block has %d", size, (int)(a - 1024), (int)(static_end - static_begin + dynamic_bytes));
  if (a & (size <= 16 ? size - 1 : 15)) fail(0, place, "misaligned: %d bytes at once of shared memory, at %d", size, (int)(a - 1024));
  return p;
}
u32 shared_name(const void* p) {
  char* c = (char*)p;
  if (c >= static_begin && c < static_end) return 1024 + (u32)(c - static_zero);
  if (c >= dynamic && c <= dynamic + dynamic_bytes) return dynamic_name + (u32)(c - dynamic);
  fail(0, PLACE, "takes the shared address of what is not in shared memory");
}
void* shared_pointer(u32 a, u32 size) { return shared_at(a, size, PLACE); }
void* dynamic_shared() { return dynamic; }
void thread_triggered() { triggered = true; }
void thread_waited() { current->early = early = false; }
void trap(const char* what, int) { fail(0, PLACE, "%s", what); }

// Who touched each byte of shared memory last, and when. Two threads may touch a byte, one of them writing, only if something orders the two: a meeting of the block or of the warp
// since then, or a barrier in shared memory at which the one arrived afterwards and for whose phase the other has waited. Atomic operations are not in each other's way.
struct Touch { u64 both; u64 time() const { return both >> 16; } u16 thread() const { return both; } };
enum : u16 { MANY = 0xffff, OF_WARP = 0x8000 };                 // threads of several warps; several lanes of warp t & 31
static int warp_of(Touch t) { return t.thread() & OF_WARP ? t.thread() & 63 : t.thread() >> 5; }          // 63: MANY
static Touch wrote[SHARED_ROOM], did_read[SHARED_ROOM], did_atomic[SHARED_ROOM];
// The later of both, warp by warp
static void learn(Clock& c, const Clock& from) {
  for (int i = 0; i < 32; i++) {
    Seen &a = c.of[i]; const Seen& b = from.of[i];
    if (b.met > a.met) a = b;
    else if (b.met == a.met) { a.last = b.last > a.last ? b.last : a.last; a.lanes |= b.lanes; }
  }
}
static Clock known[1024];                                       // by each thread, of what happened since the block has met
static bool phased, atomics;                                    // whether this block has barriers in shared memory, and atomic operations
static u64 (*by)[SHARED_ROOM][32];                              // if phased: when each warp last read a byte [0], or changed it by an atomic operation [1]
static inline bool knows(int me, int warp, u64 time, u32 lanes) { const Seen& s = known[me].of[warp]; return time < s.met || time <= s.last && s.lanes & lanes; }
struct Me { u16 number, warp; u64 block, met; };                // who touches now, and since when its block and its warp have met, as Touches compare
// Whether nothing orders that touch and what `me` does now. PLAIN: there are only meetings of warps and of the block
template <bool PLAIN> static inline bool apart(Touch t, const Me& me, const u64* by_warp) {
  if (t.both < me.block || t.thread() == me.number) return false;
  if (warp_of(t) == me.warp && t.both < me.met) return false;
  if (PLAIN || !phased) return true;
  if (t.thread() != MANY) return !knows(me.number, warp_of(t), t.time(), t.thread() & OF_WARP ? ~0u : 1u << (t.thread() & 31));
  for (int k = 0; k < 32; k++) if (k != me.warp && by_warp[k] >= block_met && !knows(me.number, k, by_warp[k], ~0u)) return true;
  return false;
}
// One more that reads, or does an atomic operation: alone if the others come before it for certain
template <bool PLAIN> static inline void join(Touch& t, const Me& me, u64* by_warp) {
  u16 who = !apart<PLAIN>(t, me, by_warp) ? me.number : warp_of(t) == me.warp ? OF_WARP | me.warp : MANY;
  t = {now << 16 | who};
  if (!PLAIN && phased) by_warp[me.warp] = now;
}
[[gnu::cold, gnu::noinline]] static void race(Touch t, Access before, Access how, u64 place) {
  static const char* VERBS[] = {"reads", "writes", "atomically changes"}; static const char* DID[] = {"read", "wrote", "atomically changed"};
  char who[60];
  if (t.thread() & OF_WARP) snprintf(who, sizeof who, t.thread() == MANY ? "other warps" : "other lanes");
  else { auto& i = threads[t.thread()].index; snprintf(who, sizeof who, "thread (%d, %d, %d)", i.x, i.y, i.z); }
  fail(0, place, "%s shared memory that %s %s, and they have not met in between", VERBS[how], who, DID[before]);
}
template <bool PLAIN> static inline void touch_each(u32 at, u32 n, Access how, u64 place) {
  u16 number = current - threads;
  Me me = {number, (u16)(number >> 5), block_met << 16, current->warp->met << 16};
  Touch w_before, r_before, noted;
  for (u32 i = at; i < at + n && i < SHARED_ROOM; i++) {
    Touch &w = wrote[i], &r = did_read[i], &a = did_atomic[i];
    if (PLAIN && i > at && w.both == w_before.both && r.both == r_before.both) { (how == WRITE ? w : r) = noted; continue; }        // as the byte before
    w_before = w; r_before = r;
    u64 *readers = PLAIN || !phased ? 0 : by[0][i], *changers = PLAIN || !phased ? 0 : by[1][i];
    if (apart<PLAIN>(w, me, 0)) race(w, WRITE, how, place);
    if (how != READ && apart<PLAIN>(r, me, readers)) race(r, READ, how, place);
    if (!PLAIN && how != ATOMIC && apart<PLAIN>(a, me, changers)) race(a, ATOMIC, how, place);
    if (how == WRITE) w = {now << 16 | number};
    else join<PLAIN>(how == READ ? r : a, me, how == READ ? readers : changers);
    noted = how == WRITE ? w : r;
  }
}
[[gnu::noinline]] static void touch_mixed(u32 at, u32 n, Access how, u64 place) { touch_each<false>(at, n, how, place); }
static inline void touch_shared(u32 at, u32 n, Access how, u64 place) {
  if (how == ATOMIC) atomics = true;
  if (__builtin_expect(phased || atomics, 0)) touch_mixed(at, n, how, place); else touch_each<true>(at, n, how, place);
}
// The arrays, and whose memory each piece of the arena is: two never share one
struct Owned { u64 begin, end; };
static Owned owned[ARENA / GUARD];
static inline Owned& owner(u64 p) { return owned[(p - (u64)arena) / GUARD]; }
[[gnu::cold, gnu::noinline]] static void no_access(u64 p, u32 n, Access how, u64 place) {
  const Owned& a = owner(p);
  if (p < a.begin || p + n > a.end) fail(p < a.begin || p >= a.end ? p : a.end, place, how == READ ? "@r" : "@w");      // the first byte that is outside
  if (how != READ) fail(p, place, "written before pdl_wait");
  for (int i = 0; i < dirty_n; i++) if (p < dirty[2 * i + 1] && p + n > dirty[2 * i]) fail(p, place, "read before pdl_wait, though the kernel before may still be writing it");
}
// A thread stays inside arrays, and before pdl_wait it neither writes nor reads what the kernel before may still be writing
static inline void touch_global(u64 p, u32 n, Access how, u64 place) {
  const Owned& a = owner(p);
  if (__builtin_expect(p < a.begin | p + n > a.end | early, 0)) no_access(p, n, how, place);
}
static inline void note_write(u64 p, u32 n) {
  if (!span || p < span->begin || p >= span->end) {
    int i = 0;
    while (i < spans_n && (p < spans[i].begin || p >= spans[i].end)) i++;
    if (i == spans_n) return;
    span = spans + i;
  }
  if (p < span->low) span->low = p;
  if (p + n > span->high) span->high = p + n;
  memset(span->written + (p - span->begin), 1, p + n > span->end ? span->end - p : n);
}
// Every access of a kernel to memory comes by here: the compiler puts the calls in
static inline void touch(const char* p, u32 n, Access how, u64 place) {
  if ((u64)p - (u64)arena < ARENA) {
    touch_global((u64)p, n, how, place);
    if (how != READ) note_write((u64)p, n);
  }
  else if (p >= dynamic && p < dynamic + dynamic_bytes) touch_shared(dynamic_name - 1024 + (u32)(p - dynamic), n, how, place);
  else if (p >= static_begin && p < static_end) touch_shared((u32)(p - static_zero), n, how, place);
}
void atomic(const void* p, u32 size) { touch((const char*)p, size, ATOMIC, PLACE); }
#define HOOK(N) \
  extern "C" SHOWN void __tsan_read##N(void* p) { touch((char*)p, N, READ, PLACE); } extern "C" SHOWN void __tsan_write##N(void* p) { touch((char*)p, N, WRITE, PLACE); } \
  extern "C" SHOWN void __tsan_unaligned_read##N(void* p) { touch((char*)p, N, READ, PLACE); } extern "C" SHOWN void __tsan_unaligned_write##N(void* p) { touch((char*)p, N, WRITE, PLACE); } \
  extern "C" SHOWN void __tsan_volatile_read##N(void* p) { touch((char*)p, N, READ, PLACE); } extern "C" SHOWN void __tsan_volatile_write##N(void* p) { touch((char*)p, N, WRITE, PLACE); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
extern "C" SHOWN void __tsan_read_range(void* p, size_t n) { touch((char*)p, n, READ, PLACE); }
extern "C" SHOWN void __tsan_write_range(void* p, size_t n) { touch((char*)p, n, WRITE, PLACE); }
extern "C" SHOWN void __tsan_init() {}
extern "C" SHOWN void __tsan_func_entry(void*) {}
extern "C" SHOWN void __tsan_func_exit() {}

// Asynchronous copies: garbage until they are waited for, and read only then
static void check_copy(u32 to, const void* from, u32 n, u32 bytes, u64 place) {
  if (bytes && ((const char*)from < arena || (const char*)from + bytes > arena_end)) fail((u64)from, place, "@");
  if ((u64)from & ((n < 16 ? n : 16) - 1)) fail((u64)from, place, "misaligned: a copy of %d bytes", n);
  if (bytes) touch_global((u64)from, bytes, READ, place);
  memset(shared_at(to, n < 16 ? n : 16, place), 0xff, n);
  touch_shared(to - 1024, n, WRITE, place);
}
void copy(u32 to, const void* from, u32 n, u32 bytes) {
  if (bytes > n) fail(0, PLACE, "a copy of %d bytes into %d", bytes, n);
  check_copy(to, from, n, bytes, PLACE);
  current->copies.push_back({to, from, n, bytes, current->group});
}
void copy_commit() { current->group++; }
void copy_wait(int n) { finish_copies(current, n); }

// A barrier in shared memory: count and arrivals missing, bytes missing, phase. Whoever waits for a phase knows what those knew who arrived.
struct Barrier { u16 count, missing; int bytes : 31; u32 phase : 1; };
struct Told { Clock open, ended; };                             // by who has arrived; by then, when the last phase ended
static std::map<u32, Told> told;
static Barrier* barrier_at(u32 a, Access how, u64 place) {
  Barrier* b = (Barrier*)shared_at(a, 8, place);
  if (!by) by = (u64(*)[SHARED_ROOM][32])calloc(2, sizeof *by);
  phased = true;
  touch_shared(a - 1024, 8, how, place);
  return b;
}
static void barrier_check(Barrier* b, Told& t) { if (!b->missing && !b->bytes) { b->phase ^= 1; b->missing = b->count; progress++; t.ended = t.open; } }
static void tell(Clock& c, const Thread* t, u64 time) {
  Clock own = {};
  own.of[(t - threads) >> 5] = {t->warp->met, time, 1u << t->lane};
  learn(c, own);
}
void barrier_init(u32 a, u32 count) { *barrier_at(a, WRITE, PLACE) = {(u16)count, (u16)count, 0, 0}; }
void barrier_arrive(u32 a, u32 bytes) {
  Barrier* b = barrier_at(a, ATOMIC, PLACE); Told& t = told[a];
  if (!b->missing || b->missing > b->count) fail(0, PLACE, "arrives at a barrier that expects nobody: it was not initialised, or more arrive than it counts");
  b->bytes += bytes; b->missing--; progress++;
  learn(t.open, known[current - threads]); tell(t.open, current, now++);
  barrier_check(b, t);
}
void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16) fail(0, PLACE, "a bulk copy of %d bytes: expected a multiple of 16", bytes);
  shared_at(to + bytes - 16, 16, PLACE);
  check_copy(to, from, bytes, bytes, PLACE);
  Clock c = {}; tell(c, current, now++);
  bulks.push_back({barrier, {to, from, bytes, bytes, 0}, c});
  progress++;
}
bool barrier_try(u32 a, u32 parity) {
  Barrier* b = barrier_at(a, ATOMIC, PLACE); Told& t = told[a];
  for (size_t i = 0; i < bulks.size();) {
    if (bulks[i].barrier != a) { i++; continue; }
    Copy c = bulks[i].copy;
    memcpy(shared_at(c.to, 16, PLACE), c.from, c.bytes);
    learn(t.open, bulks[i].done);
    bulks.erase(bulks.begin() + i);
    b->bytes -= c.bytes; progress++; barrier_check(b, t);
  }
  if (b->phase == (parity & 1)) {
    current->warp->yielded |= 1u << current->lane;
    wait_as("waits at a barrier in shared memory", 0, (void*)PLACE);
    if (b->phase == (parity & 1)) return false;
  }
  learn(known[current - threads], t.ended); current->warp->news = true;
  return true;
}
// When a warp meets, its lanes know together what each of them knew
static void tell_all(Warp& w) {
  Clock& all = known[w.lane[0] - threads];
  for (int i = 1; i < 32; i++) if (w.lane[i]) learn(all, known[w.lane[i] - threads]);
  for (int i = 1; i < 32; i++) if (w.lane[i]) known[w.lane[i] - threads] = all;
  w.news = false;
}

u16 float_half(float f) {
  u32 u = as<u32>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return 0x7fff;
  if (a >= 0x477ff000) return sign | 0x7c00;                    // rounds to infinity
  if (a < 0x38800000) {                                         // subnormal: an integer times 2^-24
    float r = as<float>(a) * 16777216.f;
    return sign | (u16)(int)rintf(r);
  }
  return sign | (u16)((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
}
// a * b is exact in a double, and so is the sum but for cases that differ in far more than half's last place: rounding twice is avoided by keeping a sticky bit
u16 half_fma(u16 a, u16 b, u16 c) {
  double p = (double)half_table[a] * half_table[b], q = half_table[c], s = p + q, e = (s - p) - q;
  float f = (float)s;
  if ((double)f != s || e != 0) {                               // make the float odd if it is not exact: then the second rounding is right
    u32 u = as<u32>(f);
    if (!(u & 1) && f == f && f - f == 0) { bool up = (double)f < s; f = as<float>(up == (f > 0) || f == 0 ? u + 1 : u - 1); }
  }
  return float_half(f);
}
}

static void tell_all(Warp& w) { emu::tell_all(w); }
static void touched(u32 shared, u32 n, Access how) { emu::touch_shared(shared - 1024, n, how, (u64)current->place); }

// ---------------------------------------------------------------- tensor cores
template <class T, class S, int HALVES, class Get> static void multiply(Warp& w, u64* v, Get get) {
  constexpr int PER = sizeof(S) == 1 ? 4 : 2, K = HALVES * PER * 4;
  static T A[16][K], B[K][8], C[16][8];
  for (int lane = 0; lane < 32; lane++) {
    emu::MmaArgs& m = *(emu::MmaArgs*)v[lane]; int g = lane >> 2, t = lane & 3;
    for (int h = 0; h < HALVES; h++) for (int j = 0; j < PER; j++) {
      int k = h * PER * 4 + t * PER + j, shift = j * 8 * (int)sizeof(S);
      A[g][k] = get(m.a[2 * h] >> shift); A[g + 8][k] = get(m.a[2 * h + 1] >> shift); B[k][g] = get(m.b[h] >> shift);
    }
  }
  for (int i = 0; i < 16; i++) {
    T sum[8] = {};
    for (int k = 0; k < K; k++) for (int j = 0; j < 8; j++) sum[j] += A[i][k] * B[k][j];
    for (int j = 0; j < 8; j++) C[i][j] = sum[j];
  }
  for (int lane = 0; lane < 32; lane++) {
    T* c = (T*)((emu::MmaArgs*)v[lane])->c; int g = lane >> 2, t = lane & 3;
    c[0] += C[g][2 * t]; c[1] += C[g][2 * t + 1]; c[2] += C[g + 8][2 * t]; c[3] += C[g + 8][2 * t + 1];
  }
}
static void mma_all(Warp& w, u64* v) {
  auto byte = [](u32 x) { return (int)(signed char)x; };
  auto half = [](u32 x) { return emu::half_table[x & 0xffff]; };
  auto brain = [](u32 x) { return emu::as<float>(x << 16); };
  if (w.exist != ~0u) fail(0, (u64)current->place, "mma in a warp of fewer than 32 threads");
  switch (((emu::MmaArgs*)v[0])->kind) {
    case emu::S8_16: multiply<int, u8, 1>(w, v, byte); break;
    case emu::S8_32: multiply<int, u8, 2>(w, v, byte); break;
    case emu::F16_8: multiply<float, u16, 1>(w, v, half); break;
    case emu::F16_16: multiply<float, u16, 2>(w, v, half); break;
    case emu::BF16_16: multiply<float, u16, 2>(w, v, brain); break;
  }
}
static void ldmatrix_all(Warp& w, u64* v) {
  if (w.exist != ~0u) fail(0, (u64)current->place, "ldmatrix in a warp of fewer than 32 threads");
  auto& first = *(emu::LdmatrixArgs*)v[0];
  for (int m = 0; m < 4; m++) {
    const u16* row[8];
    for (int i = 0; i < 8; i++) {
      u32 p = ((emu::LdmatrixArgs*)v[8 * m + i])->p;
      row[i] = (const u16*)emu::shared_at(p, 16, (u64)current->place); touched(p, 16, READ);
    }
    for (int lane = 0; lane < 32; lane++) {
      int g = lane >> 2, t = lane & 3;
      ((emu::LdmatrixArgs*)v[lane])->r[m] = first.trans ? row[2 * t][g] | (u32)row[2 * t + 1][g] << 16 : row[g][2 * t] | (u32)row[g][2 * t + 1] << 16;
    }
  }
}

// ---------------------------------------------------------------- what the processor catches
constexpr int CAUGHT = 6;
static struct sigaction before[CAUGHT];
static const int LATE = SIGRTMAX - 4, SIGNALS[CAUGHT] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, LATE};
static void on_signal(int sig, siginfo_t* info, void* context) {
  if (!running || !pthread_equal(pthread_self(), runner)) {     // none of ours: as if the emulator were not here
    if (sig != LATE) for (int i = 0; i < CAUGHT; i++) if (SIGNALS[i] == sig) sigaction(sig, &before[i], 0);
    return;
  }
  u64 place = 0; const char* how = "@";
#if defined(__x86_64__) && defined(__linux__)
  auto& registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  place = registers[REG_RIP];
  if (sig == SIGSEGV) how = registers[REG_ERR] & 2 ? "@w" : "@r";
#elif defined(__aarch64__) && defined(__linux__)
  place = ((ucontext_t*)context)->uc_mcontext.pc;
#endif
  u64 address = (u64)info->si_addr;
  if (sig == LATE) fail(0, place, "does not come to an end");
  if (sig == SIGFPE) fail(0, place, "an integer is divided by zero");
  if (sig == SIGILL || sig == SIGTRAP) fail(0, place, "an address that is not a multiple of the type's size, or an index past the end of an array");
  if (stacks && address >= (u64)stacks - BELOW && address < (u64)stacks + 1024 * STACK) fail(0, place, "too much memory in local variables: the emulator has %d KB a thread", (int)(STACK >> 10));
  if (address >= (u64)room && address < (u64)room + SHARED_ROOM + 2 * page) fail(0, place, "shared memory past the end of the block's %d bytes", (int)dynamic_bytes);
  if (!address) fail(0, place, sig == SIGSEGV && info->si_code > 0 && info->si_code < 100 && info->si_code != 128 ? how : "a misaligned or wild address");
  fail(address, place, "%s", how);
}

// ---------------------------------------------------------------- the memory of the GPU
static char* arena_next; static std::mutex arena_lock;          // threads of the host come here at the same time
static std::map<size_t, std::vector<char*>> arena_free;
extern "C" SHOWN int emulator_start() {
  std::lock_guard<std::mutex> alone(arena_lock);
  if (emu::arena) return 0;
  page = sysconf(_SC_PAGESIZE);
  char* a = (char*)mmap(0, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* s = (char*)mmap(0, 1024 * STACK + BELOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* r = (char*)mmap(0, SHARED_ROOM + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (a == MAP_FAILED || s == MAP_FAILED || r == MAP_FAILED) return 1;
  mprotect(s, BELOW, PROT_NONE);
  stacks = s + BELOW; room = r; arena_next = a + GUARD;
  for (int i = 0; i < 1024; i++) mprotect(stacks + i * STACK, page, PROT_NONE);
  mprotect(r + page, SHARED_ROOM, PROT_READ | PROT_WRITE);
  for (u32 h = 0; h < 1 << 16; h++) {
    int e = h >> 10 & 31; float m = h & 1023, f = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
    emu::half_table[h] = h & 0x8000 ? -f : f;
  }
  emu::arena_end = a + ARENA; emu::arena = a;
  return 0;
}
// Pages of its own, then GUARD bytes that nobody may touch; the array ends where they begin, but for what makes it begin at a multiple of 16
static size_t pages(size_t bytes) { return (bytes + page - 1) / page * page + (bytes ? 0 : page); }
static void own(char* first, size_t size, emu::Owned whose) { for (char* p = first; p < first + size + GUARD; p += GUARD) emu::owner((u64)(p < first + size ? p : first + size - 1)) = whose; }
extern "C" SHOWN void* emulator_alloc(size_t bytes) {
  std::lock_guard<std::mutex> alone(arena_lock);
  size_t size = pages(bytes); char* p;
  auto& free = arena_free[size];
  if (!free.empty()) { p = free.back(); free.pop_back(); }
  else { p = arena_next; if (p + size + GUARD > emu::arena_end) return 0; arena_next += size + GUARD; }
  if (mprotect(p, size, PROT_READ | PROT_WRITE)) return 0;
  memset(p, 0xff, size);
  char* at = p + size - (bytes + 15) / 16 * 16;
  own(p, size, {(u64)at, (u64)at + bytes});
  return at;
}
extern "C" SHOWN void emulator_free(void* at, size_t bytes) {
  std::lock_guard<std::mutex> alone(arena_lock);
  size_t size = pages(bytes);
  char* p = (char*)at + (bytes + 15) / 16 * 16 - size;
  own(p, size, {0, 0});
  if (size > 1 << 20) madvise(p, size, MADV_DONTNEED);
  mprotect(p, size, PROT_NONE);
  arena_free[size].push_back(p);
}

// The static shared arrays of a kernel are all of its library that begins as zeros: where that lies
extern "C" SHOWN void emulator_statics(void* kernel, char** range) {
  Dl_info info; range[0] = range[1] = 0;
  if (!dladdr(kernel, &info)) return;
  void* both[2] = {info.dli_fbase, range};
  dl_iterate_phdr([](dl_phdr_info* library, size_t, void* both) {
    if ((void*)library->dlpi_addr != ((void**)both)[0]) return 0;
    char** range = (char**)((void**)both)[1];
    for (int i = 0; i < library->dlpi_phnum; i++) {
      auto& h = library->dlpi_phdr[i];
      if (h.p_type == PT_LOAD && h.p_memsz > h.p_filesz) { range[0] = (char*)library->dlpi_addr + h.p_vaddr + h.p_filesz; range[1] = range[0] + h.p_memsz - h.p_filesz; }
    }
    return 1;
  }, both);
}

// ---------------------------------------------------------------- a launch
static void run_block(u64 seed) {
  for (int i = 0; i < total; i++) {
    Thread& t = threads[i];
    t.stack = new_stack(stacks + (i + 1) * STACK - 64 * (i & 31) - 64, run_thread);          // not all at the same place of the cache
    t.warp = &warps[i >> 5]; t.lane = i & 31; t.early = pdl; t.state = 0; t.group = 0; t.copies.clear();
    u32 x = i % blockDim.x, y = i / blockDim.x % blockDim.y, z = i / blockDim.x / blockDim.y;
    t.index = {x, y, z};
    if (!t.lane) { memset(&warps[i >> 5], 0, sizeof(Warp)); warps[i >> 5].met = now + 1; }
    warps[i >> 5].lane[i & 31] = &t; warps[i >> 5].exist |= 1u << (i & 31); warps[i >> 5].ready = warps[i >> 5].exist;
  }
  block_met = ++now; emu::phased = emu::atomics = false;
  bulks.clear(); barrier.waiting = barrier.round = 0; barrier.threads.clear();
  memset(static_begin, 0xff, static_end - static_begin); memset(dynamic, 0xff, room + page + SHARED_ROOM - dynamic);
  int n = (total + 31) / 32, first = seed % n, idle = 0;
  for (alive = total; alive;) {
    progress = 0; bool ran = false;
    for (int k = 0; k < n; k++) {
      Warp& w = warps[(first + k) % n];
      w.ready |= w.yielded; w.yielded = 0;
      if (!w.ready) continue;
      ran = true;
      u32 start = seed / 32 % 32, later = w.ready & ~0u << start;
      switch_to(w.lane[__builtin_ctz(later ? later : w.ready)]);
      if (w.arrived && !w.yielded) {
        for (int i = 0; i < 32; i++) if (w.arrived >> i & 1) current = w.lane[i];
        char lanes[1500]; describe(lanes, sizeof lanes, w); Thread* t = current; current = &home;
        report->thread[0] = t->index.x; home.index = t->index;
        fail(0, 0, "not all lanes of a warp come: %s", lanes);
      }
    }
    idle = progress ? 0 : idle + 1;
    if (alive && (!ran || idle > 2)) {
      for (int k = 0; k < n; k++) for (int i = 0; i < 32; i++) if (warps[k].exist >> i & 1 && warps[k].lane[i]->state && strcmp(warps[k].lane[i]->state, "has ended")) {
        Thread* t = warps[k].lane[i]; home.index = t->index;
        fail(0, (u64)t->place, "%s for ever: of %d threads %d have ended", t->state, total, total - alive);
      }
      fail(0, 0, "no thread can go on");
    }
  }
  for (char* p = dynamic + dynamic_bytes; p < room + page + SHARED_ROOM; p++) if (*p != (char)0xff) fail(0, 0, "shared memory was written past the end of the block's %d bytes", (int)dynamic_bytes);
}
// 0, or 1 and the report is filled
extern "C" SHOWN int emulator_launch(void (*kernel)(void**), void** arguments, const u32* grid, const u32* block, u32 shared, u64 seed, double seconds, int dependent, char* begin, char* end,
                                     const u64* written, int written_n, Span* arrays, int arrays_n, Report* out) {
  static char* alternate = (char*)malloc(1 << 16);
  entry = kernel; params = arguments; report = out; pdl = dependent; triggered = false; dirty = written; dirty_n = written_n; spans = arrays; spans_n = arrays_n; span = 0; static_begin = begin; static_end = end; static_zero = begin - ((u64)begin & 127);
  gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], block[2]}; total = block[0] * block[1] * block[2];
  memset(out, 0, sizeof *out);
  dynamic_bytes = shared; dynamic_name = 1024 + (u32)(end - static_zero + 15) / 16 * 16;
  char* top = room + page + SHARED_ROOM;                        // dynamic shared memory lies as near to the forbidden page as its address modulo 1024 allows
  dynamic = top - shared; dynamic -= ((u64)dynamic - dynamic_name) & 1023;
  stack_t stack = {}, old_stack; stack.ss_sp = alternate; stack.ss_size = 1 << 16;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}; action.sa_sigaction = on_signal; action.sa_flags = SA_SIGINFO | SA_ONSTACK; sigemptyset(&action.sa_mask);
  for (int i = 0; i < CAUGHT; i++) sigaction(SIGNALS[i], &action, &before[i]);
  struct sigevent event = {}; timer_t timer = 0; struct itimerspec limit = {};
  event.sigev_notify = SIGEV_THREAD_ID; event.sigev_signo = LATE; event._sigev_un._tid = syscall(SYS_gettid);
  limit.it_value = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  bool timed = seconds > 0 && !timer_create(CLOCK_MONOTONIC, &event, &timer);
  if (timed) timer_settime(timer, 0, &limit, 0);
  runner = pthread_self(); current = &home; running = true;
  int failed = sigsetjmp(back, 1);
  if (!failed) {
    u64 blocks = (u64)grid[0] * grid[1] * grid[2], state = seed * 2654435761u + 88172645463325252u, step = 1, at = 0;
    auto random = [&]() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state; };
    auto gcd = [](u64 a, u64 b) { while (b) { u64 c = a % b; a = b; b = c; } return a; };
    if (seed && blocks > 1) { at = random() % blocks; do step = random() % blocks; while (gcd(step, blocks) != 1); }
    for (u64 i = 0; i < blocks; i++, at = (at + step) % blocks) {
      blockIdx = {(u32)(at % grid[0]), (u32)(at / grid[0] % grid[1]), (u32)(at / grid[0] / grid[1])};
      run_block(seed ? random() >> 20 : 0);
    }
  }
  running = false; current = &home; emu::early = false;
  if (timed) timer_delete(timer);
  for (int i = 0; i < CAUGHT; i++) sigaction(SIGNALS[i], &before[i], 0);
  sigaltstack(&old_stack, 0);
  out->triggered = triggered;
  return failed;
}
