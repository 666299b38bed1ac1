// Package limit decides whose request runs next, and how much anybody may ask for. It has a
// gate with a number of places and a fair, bounded queue in front of it, and token buckets.
//
// The queue shares places by weight at two levels, first between the priority classes and
// then between the tenants of a class, by start-time fair queueing (Goyal, Vin and Cheng,
// 1997) over the requests' estimated tokens: of two tenants that always have something
// waiting, neither gets more than the other by more than about one request of each. Nothing
// starves, since every class and every tenant has a share. The same shares decide who has
// to leave a full queue, so nobody can keep others out by filling it.
//
// Queue, Bucket and what measures are pure: time is an argument, and one goroutine uses
// them at a time. Gate and Account are safe for concurrent use. Running requests never lose
// their place.
package limit
