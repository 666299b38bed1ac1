// Package limit decides whose request runs next, and how much anybody may ask
// for: a gate of so many places with a fair, bounded queue in front of it, and
// token buckets.
//
// The queue shares places by weight at two levels, first between the classes of
// priority and then between the tenants of a class, by start-time fair queueing
// (Goyal, Vin and Cheng, 1997) over the estimated tokens of the requests: of
// two tenants that always have something waiting, neither gets more than the
// other by more than about one request of each. It is starvation-free, since
// every class and every tenant has a share. The same shares decide who has to
// leave when the queue is full, so nobody can keep others out by filling it.
//
// Queue, Bucket and what measures are pure: the time is an argument, and one
// goroutine uses them at a time. Gate and Account are safe for concurrent use.
// Not a goal: taking a place away from a request that runs.
package limit
