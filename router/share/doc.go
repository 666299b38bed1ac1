// Package share lets routers side by side know of each other's choices: what each has in
// flight on each worker, and where it has sent which prefixes. These are only hints:
// nothing waits for them, and what is lost costs at most a worse choice.
//
// Each router tells what has changed, at most every Config.Interval; everything it has once
// a second, which repairs losses and shows that it lives; and where new prefixes went,
// every 100 ms and a bounded amount. A new router asks, once it has workers, and one of the
// others tells it where the latest prefixes are. Numbers are absolute, so nothing can
// drift. A router that falls silent is forgotten after Config.Expire, with its load; one
// that ends says so. Each start of a router has a new random ID, so nothing said in an
// earlier life counts for a later one.
//
// A router that hears no other says only that it is there.
package share
