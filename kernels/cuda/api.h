// The library's functions as pointers, found by dlopen, with a caller each: Go
// cannot call a C function pointer.
#ifndef XPYD_CUDA_API_H
#define XPYD_CUDA_API_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "xk.h"

// One pointer a function of xk.h, found at run time.
#define XK_EACH(F) \
	F(abi) F(last_error) F(device_info) F(open) F(load) F(load8) F(rope) F(memory) F(start) F(close) \
	F(step) F(step_draw) F(wait_layer) F(wait_step) F(gather) F(scatter) F(digest) F(set_digest) F(copy_block) \
	F(export) F(flag_clear) F(peer_open) F(peer_local) F(push) F(refill_push) F(peer_mark) F(peer_close) F(verify) \
	F(host_register) F(host_release) F(move) F(wait) F(mark_free) \
	F(link_id) F(link_open) F(link_settle) F(link_region) F(link_taken) F(link_transfer) F(link_resume) F(link_end) \
	F(arrive) F(arrived) F(arrival_bad) F(arrival_free) F(step_after) F(gate) F(gate_open) \
	F(join) F(ranks_watch) F(ranks_abort) F(ranks_end) F(ranks_drain) F(ranks_hold) F(layer_over) F(step_over) F(reduce_test) F(reduce_bench) \
	F(choices_key) F(choices_get) F(choices_set) F(fill_random) F(last_step_us) F(profile)
#define XK_FIELD(name) __typeof__(&xk_##name) name;
typedef struct { void *handle; XK_EACH(XK_FIELD) } xk_api;

// Returns NULL, or what is wrong (for the caller to free). The version comes first: a
// library of another one may lack functions, and is not to be called.
static inline char *api_open(const char *path, xk_api *a) {
	a->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!a->handle) return strdup(dlerror());
#define XK_FIND(name) if (!(a->name = (__typeof__(&xk_##name))dlsym(a->handle, "xk_" #name))) { char *e = strdup(dlerror()); dlclose(a->handle); return e; }
	XK_FIND(abi)
	if (a->abi() != XK_ABI) {
		char *e = malloc(80);
		snprintf(e, 80, "interface version %d, this xpyd needs %d", (int)a->abi(), XK_ABI);
		dlclose(a->handle);
		return e;
	}
	XK_EACH(XK_FIND)
	return NULL;
}

static inline const char *api_last_error(xk_api *a) { return a->last_error(); }
static inline int32_t api_device_info(xk_api *a, int32_t d, xk_device *o) { return a->device_info(d, o); }
static inline int32_t api_open_ctx(xk_api *a, const xk_config *g, xk_ctx **o) { return a->open(g, o); }
static inline int32_t api_load(xk_api *a, xk_ctx *c, int32_t w, int32_t l, int32_t t, const void *p, int64_t n, int64_t s) { return a->load(c, w, l, t, p, n, s); }
static inline int32_t api_load8(xk_api *a, xk_ctx *c, int32_t w, int32_t l, const void *p, int64_t n, int64_t r, const float *s, int32_t m) { return a->load8(c, w, l, p, n, r, s, m); }
static inline int32_t api_rope(xk_api *a, xk_ctx *c, const double *f, double s) { return a->rope(c, f, s); }
static inline int32_t api_memory(xk_api *a, xk_ctx *c, xk_memory_info *o) { return a->memory(c, o); }
static inline int32_t api_start(xk_api *a, xk_ctx *c, int32_t n, xk_buffers *o) { return a->start(c, n, o); }
static inline int32_t api_choices_key(xk_api *a, xk_ctx *c, uint64_t *k) { return a->choices_key(c, k); }
static inline int32_t api_choices_get(xk_api *a, xk_ctx *c, void *p, int64_t m, int64_t *n) { return a->choices_get(c, p, m, n); }
static inline int32_t api_choices_set(xk_api *a, xk_ctx *c, const void *p, int64_t n) { return a->choices_set(c, p, n); }
static inline int32_t api_close(xk_api *a, xk_ctx *c) { return a->close(c); }
static inline int32_t api_step(xk_api *a, xk_ctx *c, const xk_step_args *s) { return a->step(c, s); }
static inline int32_t api_step_draw(xk_api *a, xk_ctx *c) { return a->step_draw(c); }
static inline int32_t api_wait_layer(xk_api *a, xk_ctx *c, int32_t l) { return a->wait_layer(c, l); }
static inline int32_t api_wait_step(xk_api *a, xk_ctx *c) { return a->wait_step(c); }
static inline int32_t api_join(xk_api *a, xk_ctx **c, int32_t n, int32_t *e) { return a->join(c, n, e); }
static inline int32_t api_ranks_watch(xk_api *a, xk_ctx *c, uint64_t *w) { return a->ranks_watch(c, w); }
static inline int32_t api_ranks_abort(xk_api *a, xk_ctx *c, int32_t n) { return a->ranks_abort(c, n); }
static inline int32_t api_ranks_end(xk_api *a, xk_ctx **c, int32_t n) { return a->ranks_end(c, n); }
static inline int32_t api_ranks_drain(xk_api *a, xk_ctx **c, int32_t n) { return a->ranks_drain(c, n); }
static inline int32_t api_ranks_hold(xk_api *a, xk_ctx *c, int32_t n) { return a->ranks_hold(c, n); }
static inline int32_t api_layer_over(xk_api *a, xk_ctx *c, int32_t l, int64_t t) { return a->layer_over(c, l, t); }
static inline int32_t api_step_over(xk_api *a, xk_ctx *c, int64_t t) { return a->step_over(c, t); }
static inline int32_t api_reduce_test(xk_api *a, xk_ctx **r, int32_t n, int32_t w, int32_t k, int32_t s, const void *p, void *x, void *y) { return a->reduce_test(r, n, w, k, s, p, x, y); }
static inline int32_t api_reduce_bench(xk_api *a, xk_ctx **c, int32_t n, int32_t r, int32_t k, int32_t m, int32_t e, double *u) { return a->reduce_bench(c, n, r, k, m, e, u); }
static inline int32_t api_gather(xk_api *a, xk_ctx *c, int32_t l, int32_t b, int32_t r, int32_t n, void *p) { return a->gather(c, l, b, r, n, p); }
static inline int32_t api_scatter(xk_api *a, xk_ctx *c, int32_t l, int32_t b, int32_t r, int32_t n, const void *p) { return a->scatter(c, l, b, r, n, p); }
static inline int32_t api_digest(xk_api *a, xk_ctx *c, int32_t l, int32_t b, uint64_t *p) { return a->digest(c, l, b, p); }
static inline int32_t api_set_digest(xk_api *a, xk_ctx *c, int32_t l, int32_t b, int32_t n, const uint64_t *p) { return a->set_digest(c, l, b, n, p); }
static inline int32_t api_copy_block(xk_api *a, xk_ctx *c, int32_t d, int32_t s, int32_t p, int32_t n) { return a->copy_block(c, d, s, p, n); }
static inline int32_t api_export(xk_api *a, xk_ctx *c, void *h) { return a->export(c, h); }
static inline int32_t api_flag_clear(xk_api *a, xk_ctx *c, int32_t l) { return a->flag_clear(c, l); }
static inline int32_t api_peer_open(xk_api *a, xk_ctx *c, const void *h, int64_t n, void *f, int64_t m, xk_peer **o) { return a->peer_open(c, h, n, f, m, o); }
static inline int32_t api_peer_local(xk_api *a, xk_ctx *c, xk_ctx *t, void *f, int64_t m, xk_peer **o) { return a->peer_local(c, t, f, m, o); }
static inline int32_t api_push(xk_api *a, xk_peer *p, const xk_push_args *g, const xk_pair *l) { return a->push(p, g, l); }
static inline int32_t api_refill_push(xk_api *a, xk_peer *p, const xk_refill_args *g, const xk_held *s, const xk_refill *r) { return a->refill_push(p, g, s, r); }
static inline int32_t api_peer_mark(xk_api *a, xk_peer *p, xk_mark **o) { return a->peer_mark(p, o); }
static inline int32_t api_peer_close(xk_api *a, xk_peer *p) { return a->peer_close(p); }
static inline int32_t api_verify(xk_api *a, xk_ctx *c, const xk_landed *l, int32_t n, uint8_t *g, int64_t t) { return a->verify(c, l, n, g, t); }
static inline int32_t api_host_register(xk_api *a, xk_ctx *c, void *p, int64_t n, xk_region **o) { return a->host_register(c, p, n, o); }
static inline int32_t api_host_release(xk_api *a, xk_region *r) { return a->host_release(r); }
static inline int32_t api_move(xk_api *a, xk_ctx *c, xk_region *r, const xk_move_args *g, const xk_place *l, xk_mark **o) { return a->move(c, r, g, l, o); }
static inline int32_t api_wait(xk_api *a, xk_mark *m, int64_t t) { return a->wait(m, t); }
static inline int32_t api_mark_free(xk_api *a, xk_mark *m) { return a->mark_free(m); }
static inline int32_t api_link_id(xk_api *a, void *i) { return a->link_id(i); }
static inline int32_t api_link_open(xk_api *a, xk_ctx *c, const void *i, int64_t n, int32_t s, int64_t b, int32_t k, xk_link **o) { return a->link_open(c, i, n, s, b, k, o); }
static inline int32_t api_link_settle(xk_api *a, xk_link *l, int64_t t) { return a->link_settle(l, t); }
static inline int32_t api_link_region(xk_api *a, xk_link *l, xk_region **o) { return a->link_region(l, o); }
static inline int32_t api_link_taken(xk_api *a, xk_link *l, int64_t *b) { return a->link_taken(l, b); }
static inline int32_t api_link_transfer(xk_api *a, xk_link *l, int64_t at, int64_t n, xk_mark **m, int32_t k, int64_t t, xk_mark **o) { return a->link_transfer(l, at, n, m, k, t, o); }
static inline int32_t api_link_resume(xk_api *a, xk_link *l, int64_t t, xk_mark **o) { return a->link_resume(l, t, o); }
static inline int32_t api_link_end(xk_api *a, xk_link **x, int32_t n, xk_link **f, int32_t k) { return a->link_end(x, n, f, k); }
static inline int32_t api_arrive(xk_api *a, xk_ctx *c, xk_region *r, const xk_move_args *g, const xk_place *l, const int32_t *p, xk_arrival **o) { return a->arrive(c, r, g, l, p, o); }
static inline int32_t api_arrived(xk_api *a, xk_arrival *v, int32_t *n) { return a->arrived(v, n); }
static inline int32_t api_arrival_bad(xk_api *a, xk_arrival *v, uint8_t *b) { return a->arrival_bad(v, b); }
static inline int32_t api_arrival_free(xk_api *a, xk_arrival *v) { return a->arrival_free(v); }
static inline int32_t api_gate(xk_api *a, xk_ctx *c, xk_arrival **o) { return a->gate(c, o); }
static inline int32_t api_gate_open(xk_api *a, xk_arrival *v, int32_t n) { return a->gate_open(v, n); }
static inline int32_t api_step_after(xk_api *a, xk_ctx *c, xk_arrival *v) { return a->step_after(c, v); }
static inline int32_t api_fill_random(xk_api *a, xk_ctx *c, uint64_t s) { return a->fill_random(c, s); }
static inline int32_t api_last_step_us(xk_api *a, xk_ctx *c, double *s, double *i) { return a->last_step_us(c, s, i); }
static inline int32_t api_profile(xk_api *a, int32_t on) { return a->profile(on); }

#endif
